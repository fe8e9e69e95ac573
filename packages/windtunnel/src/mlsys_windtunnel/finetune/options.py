"""Options for training a translated pipeline: plain data, checked where it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from mlsys_core.errors import InvalidInputError
from torch import Tensor

Schedule = Literal["onecycle", "constant"]
RowLoss = Callable[[Tensor, Tensor], Tensor]  # margins [rows, k] and targets to losses [rows]


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Settings for training a network.

    Attributes:
        epochs: Passes over the training rows.
        last_epoch: Epoch after which training stops, on the schedule of all ``epochs``; None: the last.
        lr: AdamW's highest rate; embeddings learn at ``embedding_rate`` times it.
        batch_size: Rows a step, over all processes together.
        schedule: Change of the rate over the steps: see :func:`~.schedules.rate`.
        loss: A name (see :mod:`.losses`), "auto", or a function of margins ``[rows, k]`` and targets to ``[rows]``.
        metric: Score that the best epoch is chosen by: a name (see :mod:`.metrics`) or "auto".
        patience: Epochs without a better score after which training stops; None never stops early. The best epoch is
            kept in either case.
        min_gain_se: By how many standard errors of its gain, on the evaluation rows, the best epoch must be above what
            was given; else that is kept. 0 asks for any gain. A cold start is kept in any case.
        ema: Decay a step of a moving average of the parameters, which is then what is scored and kept; None: none.
        weight_decay: Weight decay of AdamW.
        leaf_decay: Likewise of the leaf values of trees, whose source may overfit; the
            answers' scale shrinks with them. None: ``weight_decay``.
        embedding_rate: See ``lr``.
        chunk_rows: Rows that go through the network at once; a batch's gradients are their sum. Smaller chunks stay in
            caches. None: 1,024.
        random_state: Seed of shuffling, dropout and the random start.
        n_threads: Threads of each process; None leaves torch's.
        checkpoint_dir: Folder in which the state is kept after each epoch; a state that is there is resumed, also when
            torchrun starts the processes again.
        device: Where the networks train, for ``get_device``. The result lies on the CPU.
        keeps_interrupted: Keeps what was best when Ctrl-C ends a run that cannot be resumed; False raises.
        verbose: Shows a progress bar on the error stream; None: where that is a terminal.
    """

    epochs: int = 10
    last_epoch: int | None = None
    lr: float = 2e-3
    batch_size: int = 1024
    schedule: Schedule = "onecycle"
    loss: str | RowLoss = "auto"
    metric: str = "auto"
    patience: int | None = None
    min_gain_se: float = 1.0
    ema: float | None = None
    weight_decay: float = 1e-6
    leaf_decay: float | None = None
    embedding_rate: float = 2.5
    chunk_rows: int | None = None
    random_state: int = 0
    n_threads: int | None = None
    checkpoint_dir: Path | str | None = field(default=None, compare=False)
    keeps_interrupted: bool = field(default=True, compare=False, repr=False)
    verbose: bool | None = field(default=None, compare=False)
    device: str = field(default="cpu", compare=False, repr=False)  # a checkpoint can be resumed on another

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            _check(name, getattr(self, name), low=1)
        for name in ("patience", "chunk_rows", "n_threads", "last_epoch"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), low=1)
        if not 0 < self.lr < float("inf"):
            raise InvalidInputError(f"lr is {self.lr}; it must be above 0 and finite")
        if self.ema is not None and not 0 < self.ema < 1:
            raise InvalidInputError(f"ema is {self.ema}; a decay lies between 0 and 1, such as .999")
        if not 0 <= self.min_gain_se < float("inf"):
            raise InvalidInputError(f"min_gain_se is {self.min_gain_se}; it must be 0 or more, and finite")
        if min(self.weight_decay, self.leaf_decay or 0) < 0 or self.embedding_rate <= 0:
            raise InvalidInputError("weight_decay and leaf_decay must be 0 or more, and embedding_rate above 0")
        if self.schedule not in get_args(Schedule):
            raise InvalidInputError(f"schedule is {self.schedule!r}; it is one of {', '.join(get_args(Schedule))}")


def _check(name: str, value: Any, *, low: int) -> None:
    if not isinstance(value, int) or value < low:
        raise InvalidInputError(f"{name} is {value!r}; it must be a whole number, {low} or more")
