"""``update``: a few hundred new labels move the thresholds, leaves, scales and encoders of a pipeline in use.

Each update begins at the pipeline as it was fitted and learns from the labels remembered so far, the newest with the
most weight: errors of one update do not add up in the next. Boosted trees are fitted anew in closed form
(:mod:`.update_trees`), other pipelines train by gradients, as many epochs as folds of the labels choose. Where labels
that were not learnt from show no sure gain, the answers stay the fitted pipeline's.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor

from mlsys_windtunnel.backends.direct.watch import column_checks
from mlsys_windtunnel.backends.soft.options import SoftOptions
from mlsys_windtunnel.finetune.losses import refuse_ranker
from mlsys_windtunnel.finetune.options import TrainingOptions
from mlsys_windtunnel.finetune.residual import Tunable
from mlsys_windtunnel.finetune.rows import Batch, TableRows, encode_rows, with_offset
from mlsys_windtunnel.finetune.train import Trainer
from mlsys_windtunnel.finetune.tune import head_of, on_device, tunable_of
from mlsys_windtunnel.finetune.update_trees import Boosted, blended, foretold, weigh
from mlsys_windtunnel.host.raw_table import Table
from mlsys_windtunnel.module import WindTunnelModule

Method = Literal["auto", "closed", "gradient"]
FEWEST_ROWS = 50  # below, labels are remembered and nothing is trained


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """Settings of updates.

    Attributes:
        most_rows: Labels that are remembered; the oldest are forgotten first.
        half_life: Updates after which a label has half of its weight.
        trust_half_life: Updates after which a label has half of its weight in what answer is trusted.
        method: ``closed`` fits boosted trees anew, ``gradient`` trains whatever the pipeline holds, and ``auto`` takes
            the first where there is nothing but boosted trees to train.
        folds: Parts that labels are cut into, to learn from all but one in turn.
        min_gain_se: By how many standard errors the loss must fall on labels not learnt from, or the fitted pipeline is
            kept.
        gradient_rows: Labels that gradients are taken on, the newest.
        level: Trained parts of trees, as in :class:`~mlsys_windtunnel.backends.soft.options.SoftOptions`.
        epochs: Epochs at most; this and what follows is of training by gradients.
        lr: Learning rate, constant.
        batch_size: Rows a step.
        random_state: Seed of the folds and of shuffling.
        device: Where the networks train, for ``get_device``; the result lies on the CPU.
    """

    most_rows: int = 20_000
    half_life: float = 12.0
    trust_half_life: float = 6.0
    method: Method = "auto"
    folds: int = 3
    min_gain_se: float = 1.0
    gradient_rows: int = 4_000
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
        if min(self.most_rows, self.gradient_rows) < FEWEST_ROWS:
            raise InvalidInputError(f"gradient_rows is {self.gradient_rows}; it must be {FEWEST_ROWS} or more")
        if not min(self.half_life, self.trust_half_life) > 0 or not 0 <= self.min_gain_se < math.inf:
            raise InvalidInputError("half_life must be above 0, and min_gain_se 0 or more and finite")
        methods = get_args(Method)
        if self.method not in methods:
            raise InvalidInputError(f"method is {self.method!r}; it is one of {', '.join(methods)}")


@dataclass(frozen=True, slots=True)
class Memory:
    """Labels of earlier updates, as the network reads their rows."""

    x: Tensor  # [rows, width] float64
    target: Tensor  # [rows] or [rows, outputs]
    weight: Tensor  # [rows], as given
    age: Tensor  # [rows] int64: updates since
    margin: Tensor  # [rows, answers, outputs] float64: answers before the row was learnt; 0 answers by gradients

    @classmethod
    def of(cls, rows: Batch, margin: Tensor) -> Memory:
        """Return new rows as they are remembered."""
        return cls(rows.x, rows.target, rows.weight, torch.zeros(len(rows), dtype=torch.int64), margin)

    def last(self, most: int) -> Memory:
        """Return the newest rows."""
        return Memory(self.x[-most:], self.target[-most:], self.weight[-most:], self.age[-most:], self.margin[-most:])

    def followed_by(self, new: Memory, most: int) -> Memory:
        """Return what is remembered after one more update."""
        older = Memory(self.x, self.target, self.weight, self.age + 1, self.margin)
        names = ("x", "target", "weight", "age", "margin")
        return Memory(*(torch.cat([getattr(older, name), getattr(new, name)])[-most:] for name in names))

    def batch(self, half_life: float, *, most: int | None = None) -> Batch:
        """Return the newest rows with the weights of their age."""
        last = slice(-most if most else None, None)
        weight = self.weight / self.weight.mean() * 0.5 ** (self.age / half_life)
        return Batch(self.x[last], self.target[last], weight[last], None)


@dataclass(frozen=True, slots=True)
class Updated:
    """Outcome of an update."""

    module: WindTunnelModule  # to answer with from now on
    memory: Memory  # for the next update
    epochs: int  # trained, 1 in closed form; 0: the fitted pipeline's answers are kept
    gain: float  # fall of the mean loss on labels not learnt from
    gain_se: float  # its standard error
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
        InvalidInputError: rows that the source refuses, labels that it does not know, a pipeline that predicts nothing,
            a ranker.

    Example:
        >>> state = update(translate(source), X_monday, y_monday)  # doctest: +SKIP
        >>> state = update(translate(source), X_tuesday, y_tuesday, memory=state.memory)  # doctest: +SKIP
        >>> state.module.predict_proba(X_wednesday)  # doctest: +SKIP
    """
    options, began = options or UpdateOptions(), time.perf_counter()
    head = head_of(start)
    refuse_ranker(head, "update it by fitting its source anew")
    new = encode_rows(start.frontend, head, X, y, weight=sample_weight, checks=column_checks(start.network))
    boosted = _boosted(start, options)
    has_learnt = memory is not None and len(memory.x) >= FEWEST_ROWS
    margin = torch.zeros(len(new), 0, 0, dtype=torch.float64)
    if boosted is not None:
        known = memory.batch(options.half_life) if memory is not None and has_learnt else None
        margin = foretold(boosted, known, new, folds=options.folds, seed=options.random_state)
    fresh = Memory.of(new, margin)
    _check(memory, fresh)
    memory = fresh.last(options.most_rows) if memory is None else memory.followed_by(fresh, options.most_rows)
    module, epochs, gain, error = start, 0, 0.0, 0.0
    if len(memory.x) >= FEWEST_ROWS and boosted is not None:
        found = weigh(boosted, memory.batch(options.trust_half_life), memory.margin)
        gain, error = found.gain, found.gain_se
        if gain > options.min_gain_se * error:
            network = blended(boosted, memory.batch(options.half_life), found)
            module, epochs = WindTunnelModule(start.frontend, network).eval(), 1
    elif len(memory.x) >= FEWEST_ROWS:
        rows = memory.batch(options.half_life, most=options.gradient_rows)
        module, epochs, gain, error = train_on(start, rows, options)
    return Updated(module, memory, epochs, gain, error, time.perf_counter() - began)


def _boosted(start: WindTunnelModule, options: UpdateOptions) -> Boosted | None:
    """Return the trees that are fitted anew in closed form; None: gradients are taken."""
    found = None if options.method == "gradient" else Boosted.of(start.network)
    if found is None and options.method == "closed":
        raise InvalidInputError("the pipeline does not end in boosted trees alone: leave method at 'auto'")
    return found


def _check(memory: Memory | None, new: Memory) -> None:
    """Raise InvalidInputError if the memory is of another pipeline or method."""
    if memory is None:
        return
    for name in ("x", "target", "margin"):
        old, now = getattr(memory, name).shape[1:], getattr(new, name).shape[1:]
        if old != now:
            raise InvalidInputError(
                f"the memory's {name} has rows of shape {list(old)}, this pipeline's and method's are {list(now)}: "
                "give the memory of an earlier update of the same pipeline by the same method, or none"
            )


def train_on(
    start: WindTunnelModule, rows: Batch, options: UpdateOptions
) -> tuple[WindTunnelModule, int, float, float]:
    """Train a copy of the module on rows.

    Returns:
        The module, ``start`` itself where nothing is surely gained; the epochs; the gain and its standard error.
    """
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

    def work() -> tuple[WindTunnelModule, int, float, float]:
        tunable = tunable_of(start, TableRows(rows), soft, training)
        every = with_offset(tunable, rows)
        epochs, gain, error = _epochs(tunable, every, options, training)
        module = start
        if epochs:
            trainer = Trainer(tunable, TableRows(every), None, replace(training, epochs=epochs))
            trainer.run()
            tunable.move("cpu")
            module = tunable.module()
        return module, epochs, gain, error

    return on_device(work, training)  # type: ignore[return-value, arg-type]


def _epochs(
    tunable: Tunable, rows: Batch, options: UpdateOptions, training: TrainingOptions
) -> tuple[int, float, float]:
    """Return the epochs that gain the most on held-out folds (0: none for sure), the gain and its standard error."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(options.random_state))
    parts = torch.tensor_split(order, options.folds)
    curves, sizes = [], []
    for number, held in enumerate(parts):
        kept = torch.cat([part for index, part in enumerate(parts) if index != number])
        trainer = Trainer(copy.deepcopy(tunable), TableRows(rows[kept]), rows[held], training)
        losses = np.array([epoch["valid_loss"] for epoch in trainer.run().history])
        curves.append(losses[0] - losses)
        sizes.append(float(rows.weight[held].sum()))
    gains = np.average(curves, axis=0, weights=sizes)
    best = int(np.nanargmax(gains))
    error = float(np.std([curve[best] for curve in curves], ddof=1) / math.sqrt(options.folds))
    is_sure = best > 0 and gains[best] > options.min_gain_se * error
    return (best if is_sure else 0), float(gains[best]), error
