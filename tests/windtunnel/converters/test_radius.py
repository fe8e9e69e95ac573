"""Neighbours within a radius vote and average as in their sources; so do local outlier factors."""

from __future__ import annotations

import numpy as np
import pytest
from mlsys_core.errors import InvalidInputError, MlsysError
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.export.artifact import load, save
from mlsys_windtunnel.export.pt2 import export_pt2, load_pt2
from mlsys_windtunnel.modules.kernel import neighbors
from mlsys_windtunnel.modules.ties import UndecidedError
from scipy.sparse import csr_matrix
from sklearn.neighbors import LocalOutlierFactor, RadiusNeighborsClassifier, RadiusNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

pytestmark = pytest.mark.filterwarnings("ignore")

RNG = np.random.default_rng(17)
X, FRESH = RNG.normal(size=(150, 3)), RNG.normal(size=(60, 3)) * 1.5
Y = X[:, 0] ** 2 + X[:, 1]
LABELS = np.array(["low", "middle", "high"])[np.digitize(Y, [0, 1.2])]
OPTIONS = [
    {"radius": 1.2},
    {"radius": 1.2, "weights": "distance"},
    {"radius": 0.9, "algorithm": "brute"},
    {"radius": 0.9, "algorithm": "brute", "weights": "distance"},
    {"radius": 1.5, "metric": "manhattan", "weights": "distance"},
    {"radius": 0.3, "metric": "cosine"},
    {"radius": 1.3, "p": 3},
    {"radius": 1.5, "p": 2, "metric_params": {"w": [1.0, 2.0, 0.5]}},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_votes_and_averages(same_answers, options, monkeypatch):
    monkeypatch.setattr(neighbors, "SAMPLES_PER_BLOCK", 64)
    for label in ("most_frequent", "low"):
        source = RadiusNeighborsClassifier(outlier_label=label, **options).fit(X, LABELS)
        same_answers(source, FRESH)
        same_answers(source, X[:20])  # distances of zero
    several = np.stack([Y > 0, np.digitize(Y, [0, 1.2])], axis=1).astype(int)
    source = RadiusNeighborsClassifier(outlier_label=[0, 2], **options).fit(X, several)
    module = translate(source)
    np.testing.assert_array_equal(module.predict(FRESH), source.predict(FRESH))
    for got, wanted in zip(module.predict_proba(FRESH), source.predict_proba(FRESH), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-9)
    for target in (Y, np.stack([Y, X[:, 2]], axis=1), np.digitize(Y, [0, 1.2])):
        source = RadiusNeighborsRegressor(**options).fit(X, target)
        with np.errstate(invalid="ignore"):
            np.testing.assert_allclose(translate(source).predict(FRESH), source.predict(FRESH), atol=1e-9)


def test_rows_without_neighbours_are_refused_where_the_source_refuses_them(tmp_path):
    source = make_pipeline(StandardScaler(), RadiusNeighborsClassifier(radius=0.8)).fit(X, LABELS)
    module = translate(source)
    np.testing.assert_allclose(module.predict_proba(X), source.predict_proba(X))
    exported = load_pt2(export_pt2(module, tmp_path / "m.pt2", methods=["predict_proba"]))
    np.testing.assert_allclose(exported.predict_proba(X), source.predict_proba(X))
    far = np.vstack([X[:2], [[90.0, 0, 0]]])
    with pytest.raises(ValueError, match="No neighbors found"):
        source.predict(far)
    for each in (module, load(save(module, tmp_path / "folder"))):
        with pytest.raises(InvalidInputError, match="No neighbors found for test samples 2"):
            each.predict(far)
    with pytest.raises(UndecidedError, match="rows 2 "):
        exported.predict_proba(far)


def test_a_label_that_is_no_class_and_weights_by_a_function_are_declined():
    for options, reason in (
        ({"outlier_label": "none"}, "outlier_label='none', which is none of the classes"),
        ({"weights": np.exp}, "weights=the function exp"),
    ):
        with pytest.raises(InvalidInputError, match=reason):
            translate(RadiusNeighborsClassifier(**options).fit(X, LABELS))


def test_a_sample_on_the_rim_is_for_the_source_to_decide():
    rows = np.array([[0.0], [1.0], [3.0]])
    source = RadiusNeighborsRegressor(radius=1.0).fit(rows, [1.0, 2.0, 3.0])
    module = translate(source)
    np.testing.assert_array_equal(module.predict([[2.0], [0.5]]), source.predict([[2.0], [0.5]]))
    module.reference = None
    np.testing.assert_array_equal(module.predict([[0.5]]), source.predict([[0.5]]))
    with pytest.raises(UndecidedError):
        module.predict([[2.0]])
    alike = translate(RadiusNeighborsRegressor(radius=1.0).fit(rows, [1.0, 1.0, 1.0]))
    alike.reference = None
    assert alike.predict([[0.0]]).tolist() == [1.0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_neighbors": 5, "contamination": 0.2},
        {"metric": "manhattan"},
        {"algorithm": "brute"},
        {"n_neighbors": 400},
        {"metric": "cosine"},
    ],
    ids=str,
)
def test_outlier_factors(same_answers, options, tmp_path):
    source = LocalOutlierFactor(novelty=True, **options).fit(X)
    module = same_answers(source, FRESH)
    same_answers(source, X[:20])
    np.testing.assert_array_equal(load(save(module, tmp_path)).predict(FRESH), source.predict(FRESH))


def test_samples_that_tie_for_the_last_place_are_for_the_source_to_decide(same_answers):
    grid = np.stack(np.meshgrid(np.arange(6.0), np.arange(6.0)), axis=-1).reshape(-1, 2)
    same_answers(LocalOutlierFactor(3, novelty=True).fit(grid), grid + 0.5)


def test_detectors_of_their_own_rows_are_declined():
    with pytest.raises(InvalidInputError, match="novelty=False"):
        translate(LocalOutlierFactor().fit(X))


@pytest.mark.parametrize("algorithm", ["kd_tree", "brute"])
@pytest.mark.parametrize("kind", [RadiusNeighborsRegressor, LocalOutlierFactor])
def test_sparse_tables_are_for_brute_force_alone(kind: type, algorithm: str) -> None:
    x = np.random.default_rng(0).normal(size=(40, 3))
    options = {"novelty": True} if kind is LocalOutlierFactor else {"radius": 9.0}
    source = kind(algorithm=algorithm, **options).fit(x, x[:, 0])
    table = csr_matrix(x[:3])
    if algorithm == "brute":
        np.testing.assert_allclose(translate(source).predict(table), source.predict(table))
        return
    with pytest.raises(ValueError, match="sparse"):
        source.predict(table)
    with pytest.raises(InvalidInputError, match="Sparse data"):
        translate(source).predict(table)


@pytest.mark.parametrize("kind", [RadiusNeighborsClassifier, RadiusNeighborsRegressor])
def test_no_radius_is_refused_by_name(kind):
    source = kind(radius=None).fit(X, LABELS if kind is RadiusNeighborsClassifier else Y)
    with pytest.raises(MlsysError, match="declines radius=None"):
        translate(source)
