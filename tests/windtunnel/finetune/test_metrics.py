"""Scores as scikit-learn's, and standard errors of gains as resampling gives them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lightgbm import LGBMClassifier, LGBMRegressor
from mlsys_windtunnel import fine_tune, translate
from mlsys_windtunnel.finetune.metrics import metric_of
from mlsys_windtunnel.finetune.tune import head_of
from sklearn.metrics import accuracy_score, log_loss, mean_absolute_error, mean_squared_error, roc_auc_score

RNG = np.random.default_rng(0)
ROWS = 300
X = RNG.normal(size=(ROWS, 3))
LABEL = (X[:, 0] + RNG.normal(0, 1, ROWS) > 0.4).astype(int)
LIGHT = {"n_estimators": 3, "num_leaves": 5, "verbose": -1, "n_jobs": 1}
CLASSIFIER = translate(LGBMClassifier(**LIGHT).fit(X, LABEL))
REGRESSOR = translate(LGBMRegressor(**LIGHT).fit(X, X[:, 0]))
BEFORE = torch.from_numpy(np.round(X[:, :1] + RNG.normal(0, 1.0, (ROWS, 1)), 1))  # with ties
AFTER = BEFORE + torch.from_numpy(0.4 * (X[:, :1] + RNG.normal(0, 1.0, (ROWS, 1))))
WEIGHT = torch.from_numpy(RNG.integers(0, 4, ROWS).astype(float))


def sigmoid(margin: Any) -> Any:
    return 1 / (1 + np.exp(-margin))


CLASSES = {
    "roc_auc": roc_auc_score,
    "neg_log_loss": lambda target, margin, **kw: -log_loss(target, sigmoid(margin), **kw),
    "accuracy": lambda target, margin, **kw: accuracy_score(target, margin > 0, **kw),
}
NUMBERS = {
    "neg_mean_squared_error": lambda target, margin, **kw: -mean_squared_error(target, margin, **kw),
    "neg_mean_absolute_error": lambda target, margin, **kw: -mean_absolute_error(target, margin, **kw),
}


def case(name: str) -> tuple[Any, torch.Tensor, Any]:
    """A metric, its targets, and the reference."""
    is_class = name in CLASSES
    target = torch.from_numpy(LABEL) if is_class else torch.from_numpy(X[:, 0])
    metric = metric_of(name, head_of(CLASSIFIER if is_class else REGRESSOR), target)
    return metric, target, (CLASSES if is_class else NUMBERS)[name]


@pytest.mark.parametrize("name", [*CLASSES, *NUMBERS])
def test_scores_are_those_of_scikit_learn(name: str) -> None:
    metric, target, reference = case(name)
    expected = reference(target.numpy(), BEFORE[:, 0].numpy(), sample_weight=WEIGHT.numpy())
    assert metric(BEFORE, target, WEIGHT) == pytest.approx(expected, abs=1e-12)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", [*CLASSES, *NUMBERS])
def test_the_standard_error_of_a_gain_is_that_of_resampled_rows(name: str) -> None:
    metric, target, reference = case(name)
    gain, error = metric.gain(BEFORE, AFTER, target, torch.ones(ROWS))
    before, after, labels = BEFORE[:, 0].numpy(), AFTER[:, 0].numpy(), target.numpy()
    assert gain == pytest.approx(reference(labels, after) - reference(labels, before), abs=1e-12)
    draws = (RNG.integers(0, ROWS, ROWS) for _ in range(400))
    gains = [reference(labels[rows], after[rows]) - reference(labels[rows], before[rows]) for rows in draws]
    assert error == pytest.approx(np.std(gains), rel=0.15)


def test_an_unsure_gain_keeps_the_source() -> None:
    changes: dict[str, Any] = {"eval_set": (X[200:], LABEL[200:]), "epochs": 2, "lr": 0.02, "metric": "neg_log_loss"}
    sure = fine_tune(CLASSIFIER, X[:200], LABEL[:200], min_gain_se=0.0, **changes)
    assert sure.best_epoch > 0
    assert 0 < sure.gain / sure.gain_se < 50
    unsure = fine_tune(CLASSIFIER, X[:200], LABEL[:200], min_gain_se=50.0, **changes)
    assert unsure.best_epoch == 0
    assert unsure.best_score == pytest.approx(sure.best_score - sure.gain)
    np.testing.assert_array_equal(unsure.module.predict_proba(X), CLASSIFIER.predict_proba(X))
