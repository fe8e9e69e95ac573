"""A random search over LightGBM's options, with early stopping: the pipeline that fine-tuning is to be above."""

from __future__ import annotations

from typing import Any

MOST_TREES = 400
PATIENCE = 30
GRID: dict[str, tuple[Any, ...]] = {
    "learning_rate": (0.02, 0.05, 0.1),
    "num_leaves": (4, 8, 16, 31, 63),
    "min_child_samples": (5, 20, 50, 100),
    "colsample_bytree": (0.3, 0.6, 1.0),
    "subsample": (0.6, 0.8, 1.0),
    "reg_lambda": (0.0, 1.0, 10.0),
}


def tuned_booster(pipeline: Any, x: Any, y: Any, *, trials: int, seed: int, is_classifier: bool) -> dict[str, Any]:
    """Return the options with the lowest loss on three folds, and the number of trees that was best there.

    Args:
        pipeline: Ends in a LightGBM estimator, unfitted.
        x: Raw training rows.
        y: Their targets.
        trials: Options tried; the first are LightGBM's own.
        seed: Seed of folds and search.
        is_classifier: Whether the targets are classes.
    """
    import lightgbm
    import numpy as np
    from sklearn.base import clone
    from sklearn.model_selection import KFold, StratifiedKFold

    rng = np.random.default_rng(seed)
    folds = list((StratifiedKFold if is_classifier else KFold)(3, shuffle=True, random_state=seed).split(x, y))
    parts = []
    for kept, held in folds:
        columns = clone(pipeline[:-1])
        parts.append((columns.fit_transform(x.iloc[kept], y[kept]), y[kept], columns.transform(x.iloc[held]), y[held]))
    found: list[tuple[float, int, dict[str, Any]]] = []
    for trial in range(trials):
        drawn = {name: choices[rng.integers(len(choices))] for name, choices in GRID.items()}
        options = {**drawn, "subsample_freq": 1} if trial else {}
        losses, counts = [], []
        for rows, target, others, truth in parts:
            model = clone(pipeline[-1]).set_params(n_estimators=MOST_TREES, **options)
            stop = lightgbm.early_stopping(PATIENCE, verbose=False)
            model.fit(rows, target, eval_set=[(others, truth)], callbacks=[stop])
            losses.append(next(iter(next(iter(model.best_score_.values())).values())))
            counts.append(model.best_iteration_)
        found.append((float(np.mean(losses)), max(2, int(np.mean(counts))), options))
    _, count, options = min(found, key=lambda each: each[0])
    return {**options, "n_estimators": count}
