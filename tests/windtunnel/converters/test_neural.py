"""Multi-layer perceptrons and dummies answer as their sources do."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.neural_network import MLPClassifier, MLPRegressor

pytestmark = pytest.mark.filterwarnings("ignore")

RNG = np.random.default_rng(19)
X, FRESH = RNG.normal(size=(80, 4)), RNG.normal(size=(30, 4)) * 2
Y = X[:, 0] ** 2 + X[:, 1]
LABELS = {
    "two": np.where(Y > 0.5, "yes", "no"),
    "three": np.array(["low", "middle", "high"])[np.digitize(Y, [0, 1.2])],
    "four": np.digitize(Y, [-0.5, 0.3, 1.5]) * 5,
}
TABLE = np.stack([Y, X[:, 2] - X[:, 3]], axis=1)


OPTIONS = [
    {"activation": "relu", "hidden_layer_sizes": (6,)},
    {"activation": "tanh", "hidden_layer_sizes": (5, 4, 3)},
    {"activation": "logistic", "hidden_layer_sizes": (7, 3)},
    {"activation": "identity", "hidden_layer_sizes": (2,)},
    {"hidden_layer_sizes": ()},
]


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_classifiers(same_answers, options, labels):
    source = MLPClassifier(**options, max_iter=30, random_state=0, learning_rate_init=0.01).fit(X, LABELS[labels])
    same_answers(source, FRESH)
    same_answers(source, FRESH[:1])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_regressors(same_answers, options):
    source = MLPRegressor(**options, max_iter=30, random_state=0, learning_rate_init=0.01)
    for target in (Y, TABLE, TABLE[:, :1]):
        same_answers(source.fit(X, target), FRESH)
        same_answers(source, FRESH[:1])


def test_a_poisson_loss_ends_in_an_exponential(same_answers):
    source = MLPRegressor(hidden_layer_sizes=(4,), loss="poisson", max_iter=20, random_state=0).fit(X, np.exp(Y / 4))
    assert source.out_activation_ == "exp"
    same_answers(source, FRESH)


def test_several_labels(same_answers):
    source = MLPClassifier((6,), max_iter=50, random_state=0).fit(X, (TABLE > 0.2).astype(int))
    module = same_answers(source, FRESH)
    assert module.predict(FRESH).shape == (30, 2)
    with pytest.raises(InvalidInputError, match="MLPClassifier"):
        translate(source.fit(X, scipy.sparse.csr_matrix((TABLE > 0.2).astype(int))))


def test_a_single_class_is_refused():
    with pytest.raises(InvalidInputError, match="MLPClassifier"):
        translate(MLPClassifier((2,), max_iter=2).fit(X, ["only"] * 80))


def test_a_fit_on_sparse_rows(same_answers):
    rows = scipy.sparse.random(80, 6, 0.5, random_state=0, format="csr")
    same_answers(MLPClassifier((3,), max_iter=5, random_state=0).fit(rows, LABELS["two"]), rows)


@pytest.mark.parametrize("labels", [*LABELS, "one"])
@pytest.mark.parametrize("strategy", ["prior", "most_frequent"])
def test_dummies_of_classes(same_answers, strategy, labels):
    target = ["only"] * 80 if labels == "one" else LABELS[labels]
    same_answers(DummyClassifier(strategy=strategy).fit(X, target), FRESH, trained=labels != "one", with_example=True)


@pytest.mark.parametrize("constant", ["middle", ["low"]], ids=str)
def test_a_constant_class(same_answers, constant):
    source = DummyClassifier(strategy="constant", constant=constant).fit(X, LABELS["three"])
    same_answers(source, FRESH, with_example=True)


@pytest.mark.parametrize("strategy", ["stratified", "uniform"])
def test_answers_by_chance_are_refused(strategy):
    with pytest.raises(InvalidInputError, match="DummyClassifier"):
        translate(DummyClassifier(strategy=strategy).fit(X, LABELS["two"]), X)


def test_dummies_of_numbers(same_answers):
    for options in ({}, {"strategy": "median"}, {"strategy": "quantile", "quantile": 0.3}):
        same_answers(DummyRegressor(**options).fit(X, Y), FRESH, with_example=True)
        same_answers(DummyRegressor(**options).fit(X, TABLE), FRESH, with_example=True)
    same_answers(DummyRegressor(strategy="constant", constant=3.5).fit(X, Y), FRESH, with_example=True)
    same_answers(DummyRegressor(strategy="constant", constant=[1, 2]).fit(X, TABLE), FRESH, with_example=True)
