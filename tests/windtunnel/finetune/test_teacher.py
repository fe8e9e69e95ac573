"""A teacher's probabilities in place of labels: the same loss, and a student that comes nearer to the teacher."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import WindTunnelClassifier, WindTunnelRegressor
from mlsys_windtunnel.finetune.choose import Teacher
from mlsys_windtunnel.finetune.losses import log_loss as row_losses
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import log_loss

SMALL = HistGradientBoostingClassifier(max_iter=8, max_leaf_nodes=6, random_state=0)


def _rows(num_rows: int = 800):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, 3))
    share = 1 / (1 + np.exp(-3 * x[:, 0] - 2 * x[:, 1] * (x[:, 2] > 0)))
    labels = np.where(rng.random(num_rows) < share, "yes", "no")
    return x, labels, np.stack([1 - share, share], axis=1)  # the teacher knows the truth


def test_rows_for_each_class_have_the_cross_entropy_with_the_teacher():
    x, labels, proba = _rows(50)
    proba[0] = [0.0, 1.0]
    rows, classes, weights = Teacher.of(proba, labels).rows(x, np.full(50, 2.0))
    assert len(rows) == 99, "a class of probability 0 needs no row"
    np.testing.assert_allclose(weights.sum(), 100)
    margin = torch.from_numpy(rows[:, :1])
    losses = row_losses(margin, torch.from_numpy((classes == "yes").astype(np.int64))).numpy()
    share = 1 / (1 + np.exp(-x[:, 0]))
    expected = -2 * (proba[:, 1] * np.log(share) + proba[:, 0] * np.log(1 - share)).sum()
    np.testing.assert_allclose((losses * weights).sum(), expected)


@pytest.mark.parametrize("has_eval_set", [True, False])
def test_a_student_learns_more_of_the_truth_from_its_teacher_than_from_labels(has_eval_set):
    x, labels, proba = _rows(1_600)
    train, test = slice(0, 600), slice(800, None)
    options = {"eval_set": (x[600:800], labels[600:800])} if has_eval_set else {}
    models = [
        WindTunnelClassifier(SMALL, epochs=6, lr=1e-2, random_state=0, metric="neg_log_loss").fit(
            x[train], labels[train], teacher_proba=teacher, **options
        )
        for teacher in (None, proba[train])
    ]
    student, taught = (log_loss(labels[test], model.predict_proba(x[test])) for model in models)
    assert models[1].best_epoch_ > 0
    assert taught < student
    assert log_loss(labels[test], models[1].source_.predict_proba(x[test])) > taught


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda proba: proba[:, :1], r"has shape \[800, 1\]; \[800 rows, 2 classes\] is needed"),
        (lambda proba: proba * 2, "must hold probabilities"),
        (lambda proba: np.full(proba.shape, "x"), "holds what is no number"),
    ],
)
def test_what_is_no_teacher_is_refused(change, message):
    x, labels, proba = _rows()
    with pytest.raises(InvalidInputError, match=message):
        WindTunnelClassifier(SMALL).fit(x, labels, teacher_proba=change(proba))


def test_regressors_are_given_the_teachers_numbers_as_targets():
    x, _, proba = _rows()
    with pytest.raises(InvalidInputError, match="give a regressor the teacher's numbers as y"):
        WindTunnelRegressor().fit(x, x[:, 0], teacher_proba=proba)
