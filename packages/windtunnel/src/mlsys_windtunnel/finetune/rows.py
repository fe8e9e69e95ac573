"""Training rows as the network reads them, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor

from mlsys_windtunnel.backends.direct.watch import ColumnCheck
from mlsys_windtunnel.finetune.losses import is_classifier
from mlsys_windtunnel.finetune.residual import Tunable
from mlsys_windtunnel.frontend import Frontend
from mlsys_windtunnel.host.raw_table import Table
from mlsys_windtunnel.modules.base import PredictorModule

ROWS_PER_CHUNK = 4_096  # of what is computed without gradients


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows with their targets and weights."""

    x: Tensor  # [rows, width], as the network reads them
    target: Tensor  # [rows] class indices int64, or [rows, outputs] numbers
    weight: Tensor  # [rows]
    offset: Tensor | None  # [rows, scores] added to the soft scores; None: nothing is

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: slice | Tensor) -> Batch:
        """Return a slice of the rows, or those of some indices."""
        offset = None if self.offset is None else self.offset[rows]
        return Batch(self.x[rows], self.target[rows], self.weight[rows], offset)

    def to(self, place: torch.device) -> Batch:
        """Return the rows on a device of torch."""
        offset = None if self.offset is None else self.offset.to(place)
        return Batch(self.x.to(place), self.target.to(place), self.weight.to(place), offset)


class Rows(Protocol):
    """Source of batches; each epoch gives all rows once, in an order that follows from the seed and the epoch."""

    @property
    def num_rows(self) -> int:
        """Number of rows of an epoch."""
        ...

    def batches(self, batch_size: int, *, seed: int, epoch: int) -> Iterator[Batch]:
        """Yield batches of ``batch_size`` rows, the last of an epoch smaller."""
        ...

    def sample(self, most: int) -> Tensor:
        """Return at most so many rows ``[rows, width]``, for statistics."""
        ...


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows in memory."""

    rows: Batch

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def batches(self, batch_size: int, *, seed: int, epoch: int) -> Iterator[Batch]:
        """See :class:`Rows`."""
        order = torch.randperm(len(self.rows), generator=generator_of(seed, epoch))
        for indices in torch.split(order, batch_size):
            yield self.rows[indices]

    def sample(self, most: int) -> Tensor:
        """See :class:`Rows`."""
        return self.rows.x[:: max(1, -(-len(self.rows) // most))]


def generator_of(seed: int, epoch: int) -> torch.Generator:
    """Make the generator of one epoch: a run that is resumed shuffles as one that was not interrupted."""
    return torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)


def encode_rows(
    frontend: Frontend,
    head: PredictorModule,
    x: Table,
    y: Any,
    *,
    weight: Any = None,
    checks: Sequence[ColumnCheck] = (),
) -> Batch:
    """Encode raw rows as a batch without offset.

    Args:
        frontend: Host part of the pipeline.
        head: Its last operator.
        x: Raw input.
        y: Labels or numbers, ``[rows]`` or ``[rows, outputs]``.
        weight: ``[rows]``, or None.
        checks: Columns of the packed table, and the numbers that the source takes there.

    Raises:
        InvalidInputError: numbers that the source refuses, other lengths, labels that the pipeline does not know,
            weights that are no numbers of 0 or more.
    """
    table = frontend.encode(x)
    for columns, contract in checks:
        contract.check(table[:, columns])
    packed = torch.from_numpy(np.ascontiguousarray(table))
    target = encode_target(head, y)
    if len(target) != len(packed):
        raise InvalidInputError(f"there are {len(packed)} rows in X and {len(target)} in y")
    weights = np.ones(len(packed)) if weight is None else np.array(weight, np.float64).reshape(-1)
    if len(weights) != len(packed) or not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
        raise InvalidInputError(f"sample_weight must hold {len(packed)} finite numbers, 0 or more, not all 0")
    return Batch(packed, target, torch.from_numpy(weights), None)


def encode_target(head: PredictorModule, y: Any) -> Tensor:
    """Return class indices int64, or numbers ``[rows, outputs]`` float64; errors as :func:`encode_rows`."""
    values = np.asarray(y)
    if not is_classifier(head):
        try:
            numbers = values.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"y holds what is no number ({error})") from error
        if not np.isfinite(numbers).all():
            raise InvalidInputError("y holds missing or infinite values")
        return torch.from_numpy(numbers.reshape(len(numbers), -1))
    labels = values.reshape(-1).tolist()
    code_of = {label: code for code, label in enumerate(head.classes)}
    unknown = sorted({repr(label) for label in labels if label not in code_of})
    if unknown:
        raise InvalidInputError(
            f"y holds {', '.join(unknown[:5])}, which the pipeline does not know; it answers {list(head.classes)[:10]}"
        )
    return torch.tensor([code_of[label] for label in labels], dtype=torch.int64)


def with_offset(tunable: Tunable, rows: Batch) -> Batch:
    """Return the rows with the addend that the exact network gives to the soft scores."""
    residual = tunable.residual
    if residual is None or tunable.exact is None or tunable.start is None:
        return rows
    chunks = [x.to(tunable.place) for x in torch.split(rows.x, ROWS_PER_CHUNK)]
    with torch.no_grad():
        parts = [residual.offset(tunable.exact(x), tunable.start(x)).cpu() for x in chunks]
    return Batch(rows.x, rows.target, rows.weight, torch.cat(parts))


def scores_of(tunable: Tunable, rows: Batch) -> Tensor:
    """Return scores of the whole, trained parts and untrained."""
    scores: Tensor = tunable.soft(rows.x)
    if rows.offset is None:
        return scores
    residual = tunable.residual
    assert residual is not None
    return residual.joined(scores, rows.offset)
