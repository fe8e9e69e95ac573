"""The number of epochs that fine-tuning is worth, found on rows held out; source and epochs are then refitted on all.

A source that is fitted on nine tenths of the rows is worse than one fitted on all of them, by more than fine-tuning may
gain. So what is held out decides, and is learnt from afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError
from sklearn.model_selection import check_cv, train_test_split
from sklearn.utils import _safe_indexing

from mlsys_windtunnel.backends.soft.options import SoftOptions
from mlsys_windtunnel.finetune.options import TrainingOptions
from mlsys_windtunnel.finetune.tune import FineTuned, fine_tune
from mlsys_windtunnel.module import WindTunnelModule

FEWEST_ROWS = 50  # of fewer, none are held out

Rows = npt.NDArray[np.int64]
Split = tuple[Rows, Rows]  # indices to train on and to judge by
FitSource = Callable[[Any, Any, Any], WindTunnelModule]  # rows, targets, weights


@dataclass(frozen=True, slots=True)
class Choice:
    """Outcome of training on parts of the rows."""

    epochs: int  # 0: nothing was surely gained
    score: float  # mean over the splits
    gain: float  # mean over the splits, over the source fitted on the same rows
    gain_se: float
    metric: str
    history: list[dict[str, float]]  # means over the splits


def splits_of(x: Any, y: Any, *, cv: Any, groups: Any, fraction: float, seed: int, is_classifier: bool) -> list[Split]:
    """Return the splits that epochs are chosen by; none where the rows are too few, or a class would be unknown.

    Args:
        x: Raw rows.
        y: Targets.
        cv: Number of folds, a splitter of scikit-learn or an iterable of splits; None: one split by chance.
        groups: ``[rows]``, for splitters that read them.
        fraction: Share of the rows that ``cv=None`` holds out, of each class alike.
        seed: Seed of that split.
        is_classifier: Whether targets are classes.

    Raises:
        InvalidInputError: the fraction is below 0, or 1 or more; groups without a splitter.
    """
    target = np.asarray(y)
    if not 0 <= fraction < 1:
        raise InvalidInputError(f"validation_fraction is {fraction}; it must be from 0 to below 1")
    if groups is not None and cv is None:
        raise InvalidInputError("groups are read by a splitter: give cv=GroupKFold() or another one that takes them")
    if cv is None:
        if not fraction or len(target) < FEWEST_ROWS:
            return []
        labels = None
        if is_classifier:
            _, counts = np.unique(target, return_counts=True)
            labels = target if counts.min() >= 2 and int(len(target) * fraction) >= len(counts) else None
        kept, held = train_test_split(np.arange(len(target)), test_size=fraction, random_state=seed, stratify=labels)
        found = [(kept, held)]
    else:
        splitter = check_cv(cv, target, classifier=is_classifier)
        found = [(np.asarray(kept), np.asarray(held)) for kept, held in splitter.split(x, target, groups)]
    if is_classifier:
        found = [split for split in found if len(np.unique(target[split[0]])) == len(np.unique(target))]
    return found


def choose_epochs(
    fit_source: FitSource,
    x: Any,
    y: Any,
    weight: Any,
    splits: Sequence[Split],
    soft: SoftOptions,
    options: TrainingOptions,
) -> Choice:
    """Fit and fine-tune on each split's rows, and find the epoch that gains the most on those held out."""
    outcomes: list[FineTuned] = []
    for number, (kept, held) in enumerate(splits):
        weights = [None if weight is None else np.asarray(weight)[rows] for rows in (kept, held)]
        x_kept, y_kept = _safe_indexing(x, kept), _safe_indexing(y, kept)
        folder = None if options.checkpoint_dir is None else Path(options.checkpoint_dir) / f"split-{number}"
        start = fit_source(x_kept, y_kept, weights[0])
        outcomes.append(
            fine_tune(
                start,
                x_kept,
                y_kept,
                eval_set=(_safe_indexing(x, held), _safe_indexing(y, held)),
                sample_weight=weights[0],
                eval_sample_weight=weights[1],
                soft=soft,
                options=replace(options, checkpoint_dir=folder),
            )
        )
    history = _means([outcome.history for outcome in outcomes])
    scores = np.array([epoch["valid_score"] for epoch in history])
    sources = [each.best_score - (each.gain if each.best_epoch else 0.0) for each in outcomes]
    best = int(np.nanargmax(scores[1:])) + 1 if len(scores) > 1 else 0
    gain = float(scores[best] - np.mean(sources))
    error = float(np.sqrt(np.mean([each.gain_se**2 for each in outcomes]) / len(outcomes)))
    is_cold = all(np.isnan(each.gain) for each in outcomes)
    is_sure = is_cold or gain > options.min_gain_se * error
    score = float(scores[best]) if is_sure else float(np.mean(sources))
    return Choice(best if is_sure else 0, score, gain, error, outcomes[0].metric, history)


def report(options: TrainingOptions, choice: Choice) -> None:
    """Say that the source is kept."""
    found = f"{choice.metric} {choice.gain:+.5f} (standard error {choice.gain_se:.5f}) on rows held out"
    why = found if choice.history else "there are too few rows to hold any out"
    say(options, f"fine-tuning: nothing surely gained, the pipeline answers as it was fitted: {why}")


def say(options: TrainingOptions, line: str) -> None:
    """Print a line on the error stream, where progress is shown."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal if options.verbose is None else options.verbose:
        console.print(line, highlight=False, markup=False)


def _means(histories: Sequence[list[dict[str, float]]]) -> list[dict[str, float]]:
    """Return the mean of each entry over runs, as far as the shortest went (patience ends them at different epochs)."""
    return [
        {name: float(np.mean([epoch[name] for epoch in epochs])) for name in epochs[0]}
        for epochs in zip(*histories, strict=False)
    ]
