"""Activations of numbers, one for each request."""

from __future__ import annotations

from typing import Any

import numpy as np


class Rows:
    """See :class:`mlsys_dvabatch.stages.activations.Activations`."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    num = property(lambda self: len(self.rows))
    nbytes = property(lambda self: self.rows.nbytes)

    def select(self, rows: Any) -> Rows:
        return Rows(self.rows[list(rows)])

    def join(self, others: Any) -> Rows:
        return Rows(np.concatenate([self.rows, *(other.rows for other in others)]))
