"""The training loop: epochs of batches, a score after each, the best kept."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor

from mlsys_windtunnel.finetune import checkpoint
from mlsys_windtunnel.finetune.checkpoint import Progress, fingerprint_of
from mlsys_windtunnel.finetune.losses import margins, row_loss
from mlsys_windtunnel.finetune.metrics import metric_of
from mlsys_windtunnel.finetune.options import Schedule, TrainingOptions
from mlsys_windtunnel.finetune.processes import Processes
from mlsys_windtunnel.finetune.residual import Tunable
from mlsys_windtunnel.finetune.rows import ROWS_PER_CHUNK, Batch, Rows, scores_of
from mlsys_windtunnel.finetune.steps import Optimizer

CHUNK_ROWS = 1024
SAMPLE_ROWS = 20_000

OnEpoch = Callable[[dict[str, float]], None]
WARM_UP = 0.1  # share of the steps of a one-cycle schedule in which the rate rises


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a run; the network holds the parameters of the best epoch."""

    history: list[dict[str, float]]
    best_epoch: int
    best_score: float
    metric: str


class Trainer:
    """One process's part of a run.

    Args:
        tunable: Networks to train; the soft one is changed.
        rows: To train on; all processes give the same.
        evaluation: To choose the best epoch by; None keeps the last.
        options: See :class:`TrainingOptions`.
    """

    def __init__(
        self,
        tunable: Tunable,
        rows: Rows,
        evaluation: Batch | None,
        options: TrainingOptions,
    ) -> None:
        self.tunable, self.rows, self.evaluation, self.options = tunable, rows, evaluation, options
        self.network, self.head, self.place = tunable.soft, tunable.head, tunable.place
        self.loss = row_loss(options.loss, self.head)
        self.metric_name = options.metric
        if evaluation is not None:
            self.metric = metric_of(options.metric, self.head, evaluation.target)
            self.metric_name = self.metric.name
        self.processes = Processes()
        self.num_steps = options.epochs * math.ceil(rows.num_rows / options.batch_size)
        sample = rows.sample(SAMPLE_ROWS)
        self.optimizer = Optimizer(
            self.network,
            sample.to(self.place),
            lr=options.lr,
            embedding_rate=options.embedding_rate,
            weight_decay=options.weight_decay,
            leaf_decay=options.leaf_decay,
        )
        if not self.optimizer.parameters:
            raise InvalidInputError("nothing of this pipeline is trained; with scope='trees' it must have trees")
        self.fingerprint = fingerprint_of(options, rows.num_rows, sample, str(self.network))

    def run(self, on_epoch: OnEpoch | None = None) -> Outcome:
        """Train; the network is left as it was in the best epoch, in evaluation mode.

        Ctrl-C ends the training with a warning; what was best until then is kept, unless several processes train, or a
        checkpoint lets the run be resumed.

        Raises:
            InvalidInputError: the loss is no longer finite, or the checkpoint is another run's.
        """
        progress = self._resumed() or self._begun()
        patience = self.options.patience
        while progress.epoch < min(self.options.epochs, self.options.last_epoch or self.options.epochs):
            if patience is not None and progress.epoch - progress.best_epoch >= patience:
                break
            try:
                self._epoch(progress)
            except KeyboardInterrupt:
                is_resumed = self.options.checkpoint_dir is not None
                if is_resumed or not self.options.keeps_interrupted or not self.processes.is_alone:
                    raise
                warnings.warn(f"interrupted in epoch {progress.epoch + 1}: the best so far is kept", stacklevel=2)
                break
            if self.options.checkpoint_dir is not None and self.processes.is_first:
                checkpoint.save(progress, Path(self.options.checkpoint_dir), self.fingerprint)
            if on_epoch is not None:
                on_epoch(progress.history[-1])
        self.network.load_state_dict(progress.best)
        self.network.eval()
        return Outcome(progress.history, progress.best_epoch, progress.best_score, self.metric_name)

    def _begun(self) -> Progress:
        score, loss = self._evaluate()
        first = _entry(0, math.nan, loss, score, lr=0.0, seconds=0.0)
        ema = [parameter.detach().clone() for parameter in self.optimizer.parameters] if self.options.ema else None
        return Progress(0, {}, {}, ema, self._state(), 0, score, [first])

    def _resumed(self) -> Progress | None:
        if self.options.checkpoint_dir is None:
            return None
        directory = Path(self.options.checkpoint_dir)
        data = self.processes.same(checkpoint.read(directory) if self.processes.is_first else None)
        if data is None:
            return None
        progress = checkpoint.load(data, directory, self.fingerprint)
        self.network.load_state_dict(progress.network)
        self.optimizer.adamw.load_state_dict(progress.optimizer)
        if progress.ema is not None:
            progress.ema = [average.to(self.place) for average in progress.ema]
        return progress

    def _epoch(self, progress: Progress) -> None:
        started = time.perf_counter()
        options = self.options
        step = progress.epoch * math.ceil(self.rows.num_rows / options.batch_size)
        total, weight, factor = 0.0, 0.0, 0.0
        self.network.train()
        with torch.random.fork_rng(devices=[self.place] if self.place.type == "cuda" else []):
            torch.manual_seed((options.random_state * 7_919 + progress.epoch) * 1_009 + self.processes.rank)
            for batch in self.rows.batches(options.batch_size, seed=options.random_state, epoch=progress.epoch):
                factor = rate(options.schedule, step, self.num_steps)
                loss, batch_weight = self._step(batch, factor)
                total, weight, step = total + loss, weight + batch_weight, step + 1
                if progress.ema is not None and options.ema is not None:
                    torch._foreach_lerp_(
                        progress.ema, [each.detach() for each in self.optimizer.parameters], 1 - options.ema
                    )
        self.network.eval()
        seconds = time.perf_counter() - started
        mean = self.processes.sum_of(total) / weight
        if not math.isfinite(mean):
            raise InvalidInputError(
                f"the loss is {mean} in epoch {progress.epoch + 1}: take an lr below {options.lr:g}"
            )
        progress.network, progress.optimizer = self._state(), self.optimizer.adamw.state_dict()
        progress.epoch += 1
        with self._averaged(progress.ema):
            score, loss = self._evaluate()
            if score > progress.best_score or self.evaluation is None:
                progress.best = self._state()
                progress.best_epoch, progress.best_score = progress.epoch, score
        progress.history.append(_entry(progress.epoch, mean, loss, score, lr=options.lr * factor, seconds=seconds))

    def _step(self, batch: Batch, factor: float) -> tuple[float, float]:
        """Train on this process's share of a batch; the sum of its weighted losses, and the whole batch's weight."""
        weight = float(batch.weight.sum()) or 1.0
        start, end = self.processes.share(len(batch))
        total = 0.0
        chunk_rows = self.options.chunk_rows or CHUNK_ROWS
        for at in range(start, end, chunk_rows):
            chunk = batch[at : min(at + chunk_rows, end)].to(self.place)
            losses = self.loss(margins(self.head, scores_of(self.tunable, chunk)), chunk.target)
            loss = (losses * chunk.weight).sum()
            torch.autograd.backward(loss / weight)
            total += loss.item()
        self.processes.add_gradients(self.optimizer.parameters)
        self.optimizer.step(factor)
        return total, weight

    def _evaluate(self) -> tuple[float, float]:
        """Return score and loss in evaluation mode on the evaluation rows; NaN without any."""
        self.network.eval()
        if self.evaluation is None:
            return math.nan, math.nan
        rows = self.evaluation
        margin = self._margins(self.tunable, rows)
        if not margin.isfinite().all():
            return -math.inf, math.inf
        loss = (self.loss(margin, rows.target) * rows.weight).sum() / rows.weight.sum()
        return self.metric(margin, rows.target, rows.weight), float(loss)

    def gain_over(self, start: Tunable) -> tuple[float, float]:
        """Return the networks' present gain over others on the evaluation rows, and its standard error.

        Args:
            start: Answers alone, without offsets.
        """
        rows = self.evaluation
        assert rows is not None
        before = self._margins(start, replace(rows, offset=None))
        return self.metric.gain(before, self._margins(self.tunable, rows), rows.target, rows.weight)

    def _margins(self, tunable: Tunable, rows: Batch) -> Tensor:
        chunks = [rows[at : at + ROWS_PER_CHUNK] for at in range(0, len(rows), ROWS_PER_CHUNK)]
        with torch.no_grad():
            return torch.cat([margins(self.head, scores_of(tunable, chunk.to(self.place))).cpu() for chunk in chunks])

    def _state(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.network.state_dict().items()}

    @contextmanager
    def _averaged(self, ema: list[Tensor] | None) -> Iterator[None]:
        """Put the moving averages in place of the parameters for the context."""
        if ema is None:
            yield
            return
        parameters = [parameter.data for parameter in self.optimizer.parameters]
        kept = [parameter.clone() for parameter in parameters]
        for parameter, average in zip(parameters, ema, strict=True):
            parameter.copy_(average)
        try:
            yield
        finally:
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)


def _entry(
    epoch: int, train_loss: float, valid_loss: float, valid_score: float, *, lr: float, seconds: float
) -> dict[str, float]:
    """Return an epoch's entry of the history."""
    return {"epoch": float(epoch)} | {name: value for name, value in locals().items() if name != "epoch"}


LOWEST_START, LOWEST_END = 1 / 25, 1e-4  # of the highest rate


def rate(schedule: Schedule, step: int, num_steps: int) -> float:
    """Return the factor of the highest learning rate in step ``step`` of ``num_steps``, above 0 and at most 1.

    ``onecycle`` rises and falls along cosines (Smith and Topin, 2018), ``constant`` stays at 1.
    """
    progress = step / max(1, num_steps - 1)
    if schedule == "constant":
        return 1.0
    if progress < WARM_UP:
        return _cosine(LOWEST_START, 1.0, progress / WARM_UP)
    return _cosine(1.0, LOWEST_END, (progress - WARM_UP) / (1 - WARM_UP))


def _cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, progress))) / 2
