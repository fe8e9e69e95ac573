"""``fine_tune``: a translated pipeline, trained further end to end (section 5.2.4)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from mlsys_core.device import get_device, run_on
from mlsys_core.errors import InvalidInputError

from mlsys_windtunnel.backends.direct.watch import column_checks
from mlsys_windtunnel.backends.soft.options import SoftOptions
from mlsys_windtunnel.backends.soft.soften import soften
from mlsys_windtunnel.finetune.options import TrainingOptions
from mlsys_windtunnel.finetune.processes import joined
from mlsys_windtunnel.finetune.residual import Tunable
from mlsys_windtunnel.finetune.rows import Batch, Rows, TableRows, encode_rows, with_offset
from mlsys_windtunnel.finetune.train import OnEpoch, Trainer
from mlsys_windtunnel.host.raw_table import Table
from mlsys_windtunnel.module import WindTunnelModule
from mlsys_windtunnel.modules.base import PredictorModule


@dataclass(frozen=True, slots=True)
class FineTuned:
    """A trained module and how it came about."""

    module: WindTunnelModule  # in evaluation mode; what was given, the source's exact translation, if epoch 0 is kept
    history: list[dict[str, float]]  # an epoch each, the first before training
    best_epoch: int  # 0: what was given, which no epoch was surely better than (min_gain_se)
    best_score: float  # NaN without evaluation rows
    metric: str
    gain: float = math.nan  # of the best epoch over what was given; NaN for a cold start and without evaluation rows
    gain_se: float = math.nan  # its standard error


def fine_tune(
    module: WindTunnelModule,
    X: Table,  # noqa: N803 - scikit-learn's name
    y: Any,
    *,
    eval_set: tuple[Table, Any] | None = None,
    sample_weight: Any = None,
    eval_sample_weight: Any = None,
    soft: SoftOptions | None = None,
    options: TrainingOptions | None = None,
    **changes: Any,
) -> FineTuned:
    """Train a translated pipeline further, on its own training data, on new data, or towards another objective.

    Args:
        module: Result of :func:`~mlsys_windtunnel.translate`, or of an earlier run; it is left as it is.
        X: Raw training rows, as the source takes them.
        y: Labels that the source knows, or numbers.
        eval_set: Rows by which the best epoch is chosen; where its gain on the module itself is not above
            ``min_gain_se`` standard errors, that is kept. Without these rows, the last epoch is kept.
        sample_weight: Weights of the training rows; those of classes are ``sklearn.utils.compute_sample_weight``.
        eval_sample_weight: Weights of the evaluation rows.
        soft: Options that make the trees smooth; those of an earlier run's module stay as they are.
        options: Options of training.
        changes: Fields of either options by name, in place of what ``soft`` and ``options`` hold: ``level="L4"``,
            ``epochs=3``, ``loss=my_loss``.

    Raises:
        InvalidInputError: an option is out of range, rows that the source refuses, labels that it does not know, a
            pipeline that answers neither classes nor numbers, training that diverged.

    Example:
        >>> tuned = fine_tune(translate(source), X, y, eval_set=(X_val, y_val), level="L4")  # doctest: +SKIP
        >>> tuned.module.predict_proba(X_test)  # doctest: +SKIP
    """
    soft, options = with_changes(soft or SoftOptions(), options or TrainingOptions(), changes)
    head = head_of(module)
    checks = column_checks(module.network)
    train = encode_rows(module.frontend, head, X, y, weight=sample_weight, checks=checks)
    evaluation = None
    if eval_set is not None:
        evaluation = encode_rows(module.frontend, head, *eval_set, weight=eval_sample_weight, checks=checks)

    def work() -> FineTuned:
        tunable = tunable_of(module, TableRows(train), soft, options)
        held = None if evaluation is None else with_offset(tunable, evaluation)
        return run(module, tunable, TableRows(with_offset(tunable, train)), held, soft, options)

    return on_device(work, options)


def run(
    module: WindTunnelModule,
    tunable: Tunable,
    rows: Rows,
    evaluation: Batch | None,
    soft: SoftOptions,
    options: TrainingOptions,
) -> FineTuned:
    """Train what was made ready."""
    with joined() as processes:
        trainer = Trainer(tunable, rows, evaluation, options)
        with progress_bar(options, trainer.metric_name, is_shown=processes.is_first) as on_epoch:
            outcome = trainer.run(on_epoch)
    score, gain = outcome.best_score, (math.nan, math.nan)
    is_warm = soft.init != "random" or Tunable.of(module) is not None
    if is_warm and evaluation is not None:
        source = Tunable(tunable.frontend, copy.deepcopy(module.network))
        source.move(tunable.place)
        gain = trainer.gain_over(source)
        if (outcome.best_epoch == 0 and tunable.exact is not None) or not gain[0] > options.min_gain_se * gain[1]:
            start = WindTunnelModule(tunable.frontend, copy.deepcopy(module.network)).eval()
            start.reference = module.reference
            return FineTuned(start, outcome.history, 0, score - gain[0], outcome.metric, *gain)
    tunable.move("cpu")
    return FineTuned(tunable.module(), outcome.history, outcome.best_epoch, score, outcome.metric, *gain)


def with_changes(
    soft: SoftOptions, options: TrainingOptions, changes: dict[str, Any]
) -> tuple[SoftOptions, TrainingOptions]:
    """Return options with some fields replaced.

    Raises:
        InvalidInputError: a name that neither has.
    """
    names = (SoftOptions.__dataclass_fields__, TrainingOptions.__dataclass_fields__)
    unknown = [name for name in changes if not any(name in fields for fields in names)]
    if unknown:
        raise InvalidInputError(f"there is no option {unknown[0]}; there are {', '.join([*names[0], *names[1]])}")
    of_soft, of_training = ({name: changes[name] for name in changes if name in fields} for fields in names)
    return replace(soft, **of_soft), replace(options, **of_training)


def head_of(module: WindTunnelModule) -> PredictorModule:
    """Return the module's last operator.

    Raises:
        InvalidInputError: it predicts nothing.
    """
    if module.predictor is None:
        raise InvalidInputError("the pipeline ends in a transformer; fine-tuning needs a predictor to compare with y")
    return module.predictor


def on_device(work: Callable[[], FineTuned], options: TrainingOptions) -> FineTuned:
    """Run a training on a stream of its device, with its threads."""

    def threaded() -> FineTuned:
        with threads(options.n_threads):
            return work()

    return run_on(get_device(options.device), threaded)


def tunable_of(module: WindTunnelModule, rows: Rows, soft: SoftOptions, options: TrainingOptions) -> Tunable:
    """Make a soft copy of an exact module, or a copy of the parts of one that was fine-tuned before, on the device."""
    tunable = _tunable_of(module, rows, soft, seed=options.random_state)
    tunable.move(get_device(options.device).torch_name)
    return tunable


def _tunable_of(module: WindTunnelModule, rows: Rows, soft: SoftOptions, *, seed: int) -> Tunable:
    known = Tunable.of(module)
    if known is not None:
        return copy.deepcopy(known)
    network = soften(module.network, rows.sample(100_000), soft, seed=seed)
    if soft.init != "residual":
        return Tunable(copy.deepcopy(module.frontend), network)
    start = copy.deepcopy(network).eval().requires_grad_(False)
    exact = copy.deepcopy(module.network).eval().requires_grad_(False)
    return Tunable(copy.deepcopy(module.frontend), network, exact, start)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run the context with so many threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def progress_bar(options: TrainingOptions, metric: str, *, is_shown: bool) -> Iterator[OnEpoch | None]:
    """Show a bar over epochs on the error stream, if it is wanted."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    is_shown = is_shown and (console.is_terminal if options.verbose is None else options.verbose)
    with Progress(console=console, disable=not is_shown) as progress:
        task = progress.add_task("fine-tuning", total=options.epochs)

        def on_epoch(epoch: dict[str, float]) -> None:
            score = "" if epoch["valid_score"] != epoch["valid_score"] else f", {metric} {epoch['valid_score']:.5f}"
            progress.update(
                task, completed=epoch["epoch"], description=f"fine-tuning: loss {epoch['train_loss']:.5f}{score}"
            )

        yield on_epoch
