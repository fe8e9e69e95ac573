"""``update``: a few hundred new labels move the thresholds, leaves, scales and encoders of a pipeline in use.

Each update begins at the pipeline as it was fitted and trains on the labels remembered so far, the newest with the most
weight: errors of one update do not add up in the next. Folds of these rows choose how long is trained; where they show
no sure gain, the answers stay the fitted pipeline's.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor

from mlsys_windtunnel.backends.direct.watch import column_checks
from mlsys_windtunnel.backends.soft.options import SoftOptions
from mlsys_windtunnel.finetune.options import TrainingOptions
from mlsys_windtunnel.finetune.residual import Tunable
from mlsys_windtunnel.finetune.rows import Batch, TableRows, encode_rows, with_offset
from mlsys_windtunnel.finetune.train import Trainer
from mlsys_windtunnel.finetune.tune import head_of, on_device, tunable_of
from mlsys_windtunnel.host.raw_table import Table
from mlsys_windtunnel.module import WindTunnelModule

FEWEST_ROWS = 50  # below, labels are remembered and nothing is trained


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """Settings of updates.

    Attributes:
        most_rows: Labels that are remembered; the oldest are forgotten first.
        half_life: Updates after which a label has half of its weight.
        folds: Parts that the labels are cut into to choose the number of epochs by.
        min_gain_se: By how many standard errors over the folds the loss must fall, or the fitted pipeline is kept.
        level: Trained parts of trees, as in :class:`~mlsys_windtunnel.backends.soft.options.SoftOptions`.
        epochs: Epochs at most.
        lr: Learning rate, constant.
        batch_size: Rows a step.
        random_state: Seed of the folds and of shuffling.
        device: Where the networks train, for ``get_device``; the result lies on the CPU.
    """

    most_rows: int = 4_000
    half_life: float = 8.0
    folds: int = 3
    min_gain_se: float = 1.0
    level: str = "L2"
    epochs: int = 6
    lr: float = 3e-4
    batch_size: int = 256
    random_state: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.most_rows < FEWEST_ROWS:
            raise InvalidInputError(f"most_rows is {self.most_rows}; it must be {FEWEST_ROWS} or more")
        if self.folds < 2:
            raise InvalidInputError(f"folds is {self.folds}; it must be 2 or more")
        if not self.half_life > 0 or not 0 <= self.min_gain_se < math.inf:
            raise InvalidInputError("half_life must be above 0, and min_gain_se 0 or more and finite")


@dataclass(frozen=True, slots=True)
class Memory:
    """Labels of earlier updates, as the network reads their rows."""

    x: Tensor  # [rows, width] float64
    target: Tensor  # [rows] or [rows, outputs]
    weight: Tensor  # [rows], as given
    age: Tensor  # [rows] int64: updates since

    def with_new(self, rows: Batch, most: int) -> Memory:
        """Return what is remembered after one more update."""
        parts = (
            torch.cat([self.x, rows.x])[-most:],
            torch.cat([self.target, rows.target])[-most:],
            torch.cat([self.weight, rows.weight])[-most:],
            torch.cat([self.age + 1, torch.zeros(len(rows), dtype=torch.int64)])[-most:],
        )
        return Memory(*parts)

    @classmethod
    def of(cls, rows: Batch, most: int) -> Memory:
        """Return the memory of a first update."""
        age = torch.zeros(len(rows), dtype=torch.int64)
        return cls(rows.x[-most:], rows.target[-most:], rows.weight[-most:], age[-most:])

    def batch(self, half_life: float) -> Batch:
        """Return the rows with the weights of their age."""
        return Batch(self.x, self.target, self.weight * 0.5 ** (self.age / half_life), None)


@dataclass(frozen=True, slots=True)
class Updated:
    """Outcome of an update."""

    module: WindTunnelModule  # to answer with from now on
    memory: Memory  # for the next update
    epochs: int  # trained; 0: the fitted pipeline's answers are kept
    gain: float  # fall of the mean loss on held-out folds
    gain_se: float  # its standard error over the folds
    seconds: float


def update(
    start: WindTunnelModule,
    X: Table,  # noqa: N803 - scikit-learn's name
    y: Any,
    *,
    memory: Memory | None = None,
    sample_weight: Any = None,
    options: UpdateOptions | None = None,
) -> Updated:
    """Bring a pipeline up to date with new labels.

    Args:
        start: Translation of the pipeline as it was fitted (not of an earlier update's module); it is left as it is.
        X: New raw rows.
        y: Their labels or numbers.
        memory: ``memory`` of the update before; None: this is the first.
        sample_weight: Weights of the new rows.
        options: See :class:`UpdateOptions`.

    Raises:
        InvalidInputError: rows that the source refuses, labels that it does not know, a pipeline that predicts nothing.

    Example:
        >>> state = update(translate(source), X_monday, y_monday)  # doctest: +SKIP
        >>> state = update(translate(source), X_tuesday, y_tuesday, memory=state.memory)  # doctest: +SKIP
        >>> state.module.predict_proba(X_wednesday)  # doctest: +SKIP
    """
    options, began = options or UpdateOptions(), time.perf_counter()
    head = head_of(start)
    new = encode_rows(start.frontend, head, X, y, weight=sample_weight, checks=column_checks(start.network))
    memory = Memory.of(new, options.most_rows) if memory is None else memory.with_new(new, options.most_rows)
    rows = memory.batch(options.half_life)
    if len(rows) < FEWEST_ROWS:
        return Updated(start, memory, 0, 0.0, 0.0, time.perf_counter() - began)
    training = TrainingOptions(
        epochs=options.epochs,
        lr=options.lr,
        batch_size=options.batch_size,
        schedule="constant",
        random_state=options.random_state,
        device=options.device,
        keeps_interrupted=False,
    )
    soft = SoftOptions(level=options.level)  # type: ignore[arg-type]  # it checks the name

    def work() -> Updated:
        tunable = tunable_of(start, TableRows(rows), soft, training)
        every = with_offset(tunable, rows)
        epochs, gain, error = _epochs(tunable, every, options, training)
        module = start
        if epochs:
            trainer = Trainer(tunable, TableRows(every), None, replace(training, epochs=epochs))
            trainer.run()
            tunable.move("cpu")
            module = tunable.module()
        return Updated(module, memory, epochs, gain, error, time.perf_counter() - began)

    return on_device(work, training)  # type: ignore[return-value, arg-type]


def _epochs(
    tunable: Tunable, rows: Batch, options: UpdateOptions, training: TrainingOptions
) -> tuple[int, float, float]:
    """Return the epochs that gain the most on held-out folds (0: none for sure), the gain and its standard error."""
    import copy

    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(options.random_state))
    parts = torch.tensor_split(order, options.folds)
    curves, sizes = [], []
    for number, held in enumerate(parts):
        kept = torch.cat([part for index, part in enumerate(parts) if index != number])
        trainer = Trainer(copy.deepcopy(tunable), TableRows(_taken(rows, kept)), _taken(rows, held), training)
        losses = np.array([epoch["valid_loss"] for epoch in trainer.run().history])
        curves.append(losses[0] - losses)
        sizes.append(float(rows.weight[held].sum()))
    gains = np.average(curves, axis=0, weights=sizes)
    best = int(np.nanargmax(gains))
    error = float(np.std([curve[best] for curve in curves], ddof=1) / math.sqrt(options.folds))
    is_sure = best > 0 and gains[best] > options.min_gain_se * error
    return (best if is_sure else 0), float(gains[best]), error


def _taken(rows: Batch, indices: Tensor) -> Batch:
    offset = None if rows.offset is None else rows.offset[indices]
    return Batch(rows.x[indices], rows.target[indices], rows.weight[indices], offset)
