"""The suite ``windtunnel-distil``: what share of a slow model's gain a small pipeline keeps when it learns its answers.

``pipeline`` is a small LightGBM pipeline, ``on labels`` the same after fine-tuning on the labels, ``distilled`` after
fine-tuning towards the teacher's out-of-fold probabilities. All three have the pipeline's own trees, though smooth ones
read more features each; the teacher is an average of large forests and boosted trees.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mlsys_core.errors import InvalidInputError
from mlsys_core.report import Section, Table

from mlsys_bench.windtunnel.public_sets import SETS, make_pipeline_of

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

CONTESTANTS = ("pipeline", "on labels", "distilled", "teacher")
DATA = ("adult", "bio-train")
# Chosen on seed 100. No rows are held out: a tenth of 4,000 is too few to be sure of gains of this size.
TRAINING = {"level": "L4", "batch_size": 128, "lr": 5e-3, "validation_fraction": 0}


def run(
    context: BenchContext, *, seeds: int = 5, rows: int = 4_000, trees: int = 10, data: tuple[str, ...] = ()
) -> Section:
    """Fit all on each set and score other rows by their AUC.

    Args:
        context: The suite's context; quick has one seed, 600 rows and a small teacher.
        seeds: Splits and draws of rows: 0, 1, ...
        rows: Training rows at most, and test rows at most.
        trees: Trees of the pipeline.
        data: Sets of two classes; ``adult`` and ``bio-train`` if none.
    """
    import torch

    unknown = [name for name in data if name not in SETS or not SETS[name][0]]
    if unknown:
        known = ", ".join(name for name, (is_classifier, _) in SETS.items() if is_classifier)
        raise InvalidInputError(f"{unknown[0]!r} is no set of classes here; there are {known}")
    if context.is_quick:
        seeds, rows = 1, 600
    torch.set_num_threads(context.num_threads)
    found: dict[str, Any] = {}
    for name in data or DATA:
        scores: dict[str, list[float]] = {each: [] for each in CONTESTANTS}
        times: dict[str, list[float]] = {each: [] for each in CONTESTANTS}
        epochs: list[int] = []
        for seed in range(seeds):
            models, test = _fitted(name, seed, rows, trees, context)
            epochs.append(models["distilled"].best_epoch_)
            for each in CONTESTANTS:
                score, seconds = _scored(models[each], *test)
                scores[each].append(score)
                times[each].append(seconds)
        found[name] = {"scores": scores, "epochs": epochs, "rows_per_s": _rates(times, len(test[1]))}
        found[name] |= {"share": _share(scores, "distilled"), "share_on_labels": _share(scores, "on labels")}
        context.console.print(f"{name}: {found[name]['share']:.0%} of the teacher's gain is kept", highlight=False)
    columns = ["set", *CONTESTANTS, "share kept, distilled", "share kept, on labels"]
    table = [
        [
            name,
            *(f"{sum(each['scores'][who]) / seeds:.4f}" for who in CONTESTANTS),
            f"{each['share']:.0%}",
            f"{each['share_on_labels']:.0%}",
        ]
        for name, each in found.items()
    ]
    caption = f"{seeds} seeds, {rows:,} training rows at most, {trees} trees in the pipeline; AUC"
    return Section("WindTunnel: distilled", [Table(columns, table, caption)], data={"results": found})


def _share(scores: dict[str, list[float]], student: str) -> float:
    """Return the share of the teacher's gain over the pipeline that a student keeps, over all seeds."""
    base = sum(scores["pipeline"])
    return (sum(scores[student]) - base) / (sum(scores["teacher"]) - base)


def _rates(times: dict[str, list[float]], rows: int) -> dict[str, float]:
    return {name: rows / sorted(seconds)[len(seconds) // 2] for name, seconds in times.items()}


def _fitted(name: str, seed: int, rows: int, trees: int, context: BenchContext) -> tuple[dict[str, Any], Any]:
    """Return the fitted contestants by name, and the rows and labels to score."""
    from mlsys_windtunnel import WindTunnelClassifier
    from sklearn.model_selection import cross_val_predict

    x, y, *test = SETS[name][1](name, seed, rows)
    small = make_pipeline_of(x, trees, seed, context.num_threads, is_classifier=True)
    teacher = _teacher(x, seed, context)
    answers = cross_val_predict(teacher, x, y, cv=5, method="predict_proba")
    options: dict[str, Any] = {"random_state": seed, "epochs": 3 if context.is_quick else 10, **TRAINING}
    models = {
        "pipeline": small.fit(x, y),
        "on labels": WindTunnelClassifier(small, **options).fit(x, y),
        "distilled": WindTunnelClassifier(small, **options).fit(x, y, teacher_proba=answers),
        "teacher": teacher.fit(x, y),
    }
    return models, test


def _teacher(x: Any, seed: int, context: BenchContext) -> Any:
    from lightgbm import LGBMClassifier
    from sklearn.ensemble import ExtraTreesClassifier, VotingClassifier
    from sklearn.pipeline import make_pipeline

    many = 10 if context.is_quick else 100
    columns = make_pipeline_of(x, 1, seed, context.num_threads, is_classifier=True)[0]
    boosted = LGBMClassifier(
        n_estimators=many, learning_rate=0.06, num_leaves=15, subsample=0.7, subsample_freq=1, colsample_bytree=0.5,
        random_state=seed, verbose=-1, n_jobs=context.num_threads,
    )  # fmt: skip
    forest = ExtraTreesClassifier(many, min_samples_leaf=3, random_state=seed, n_jobs=context.num_threads)
    return make_pipeline(columns, VotingClassifier([("boosted", boosted), ("forest", forest)], voting="soft"))


def _scored(model: Any, x: Any, y: Any) -> tuple[float, float]:
    """Return the AUC and the seconds of the answers, the best of three."""
    from sklearn.metrics import roc_auc_score

    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        proba = model.predict_proba(x)[:, 1]
        seconds.append(time.perf_counter() - began)
    return float(roc_auc_score(y, proba)), min(seconds)
