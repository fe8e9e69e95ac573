"""The source of a translation, kept to decide ties between the points that it stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from mlsys_windtunnel.host.raw_table import Table


@dataclass(frozen=True, slots=True)
class Reference:
    """A fitted pipeline that answers in its translation's stead; copies of a module share it, files do not hold it."""

    source: Any

    def answer(self, method: str, x: Table) -> Any:
        """Return the source's own answer for a table in a form that it takes; floats come as float64."""
        answer = getattr(self.source, method)(x)
        return [_dense(each) for each in answer] if isinstance(answer, list) else _dense(answer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Reference:
        """Return the same: nothing changes a source."""
        return self


def _dense(answer: Any) -> Any:
    array = answer.toarray() if hasattr(answer, "toarray") else np.asarray(answer)
    return array.astype(np.float64) if array.dtype.kind == "f" else array
