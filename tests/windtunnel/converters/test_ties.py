"""Rows as near to one stored point as to another: the source decides, or they are refused, never anything else.

Which of several equally near points counts follows from the order of the source's search and of its sums.
"""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import translate
from mlsys_windtunnel.export import artifact
from mlsys_windtunnel.export.onnx import export_onnx, load_onnx
from mlsys_windtunnel.export.pt2 import export_pt2, load_pt2
from mlsys_windtunnel.finetune.tune import fine_tune
from mlsys_windtunnel.modules.kernel import neighbors
from mlsys_windtunnel.modules.ties import UndecidedError
from sklearn import cluster
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import BaggingClassifier, RandomForestClassifier, StackingClassifier, VotingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.multiclass import OutputCodeClassifier
from sklearn.multioutput import MultiOutputRegressor
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor, NearestCentroid
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import KBinsDiscretizer, OneHotEncoder, StandardScaler
from sklearn.tree import DecisionTreeClassifier

pytestmark = pytest.mark.filterwarnings("ignore")

RNG = np.random.default_rng(5)
X = RNG.uniform(0, 4, size=(90, 3))
CLASSES, TARGETS = RNG.integers(0, 3, 90), RNG.normal(size=90)
FRESH = RNG.uniform(0, 4, size=(150, 3))
LATTICE = np.stack(np.meshgrid(np.arange(5.0), np.arange(5.0)), axis=-1).reshape(-1, 2)
METHODS = ("predict", "predict_proba")
SQUARE = np.array([[0, 0], [0, 3], [3, 0], [3, 3]]).repeat(5, axis=0) + np.tile(
    [[0, 0], [0.1, 0], [-0.1, 0], [0, 0.1], [0, -0.1]], (4, 1)
)  # four clusters around its corners
SEARCHES = [
    {"algorithm": algorithm, "weights": weights, **metric}
    for algorithm in ("kd_tree", "ball_tree", "brute")
    for weights in ("uniform", "distance")
    for metric in ({}, {"p": 1}, {"metric": "chebyshev"})
]


def _bins(model, *steps):
    return make_pipeline(KBinsDiscretizer(3, encode="ordinal"), *steps, model)


def _alone(module):
    """The module as a folder holds it: without its source."""
    copied = copy.deepcopy(module)
    copied.reference = None
    return copied


def _assert_same(source, answering, rows):
    for method in METHODS:
        if hasattr(source, method):
            got, wanted = getattr(answering, method)(rows), getattr(source, method)(rows)
            np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), atol=1e-6)


def _refused(source, answering, rows):
    """Return how many rows, one by one, are refused; the others' answers are the source's."""
    refused = 0
    for row in rows:
        try:
            _assert_same(source, answering, row[None])
        except UndecidedError:
            refused += 1
    return refused


@pytest.mark.parametrize("options", SEARCHES, ids=str)
@pytest.mark.parametrize("model", [KNeighborsClassifier, KNeighborsRegressor])
def test_the_source_decides_or_the_row_is_refused(model, options):
    source = _bins(model(4, **options)).fit(X, CLASSES if model is KNeighborsClassifier else TARGETS)
    module = translate(source)
    _assert_same(source, module, FRESH)
    assert _refused(source, _alone(module), FRESH) > 0


@pytest.mark.parametrize("steps", [[StandardScaler()], [OneHotEncoder()]], ids=str)
def test_ties_within_rounding(steps):
    """Scaled lattices tie but for rounding, and categories are compared by brute force."""
    source = _bins(KNeighborsClassifier(3), *steps).fit(X, CLASSES)
    module = translate(source)
    _assert_same(source, module, FRESH)
    assert _refused(source, _alone(module), FRESH[:60]) > 0


def test_several_outputs_and_names():
    frame = pd.DataFrame(X, columns=list("abc"))
    source = _bins(KNeighborsClassifier(3)).fit(frame, np.stack([CLASSES, TARGETS > 0], axis=1))
    module = translate(source)
    rows = pd.DataFrame(FRESH, columns=list("abc"))
    np.testing.assert_array_equal(module.predict(rows), source.predict(rows))
    for got, wanted in zip(module.predict_proba(rows), source.predict_proba(rows), strict=True):
        np.testing.assert_allclose(got, wanted)
    np.testing.assert_array_equal(module.predict({name: rows[name] for name in rows}), source.predict(rows))


@pytest.mark.parametrize(
    "source",
    [
        BaggingClassifier(KNeighborsClassifier(3), n_estimators=2, random_state=0),
        VotingClassifier([("k", KNeighborsClassifier(3)), ("l", LogisticRegression())]),
        StackingClassifier([("k", KNeighborsClassifier(3))], cv=2, passthrough=True),
        TransformedTargetRegressor(KNeighborsRegressor(3), func=np.exp, inverse_func=np.log),
        MultiOutputRegressor(KNeighborsRegressor(3)),
    ],
    ids=lambda source: type(source).__name__,
)
def test_within_other_estimators(source):
    target = np.stack([TARGETS, CLASSES], axis=1) if isinstance(source, MultiOutputRegressor) else CLASSES
    source = _bins(source).fit(X, target)
    module = translate(source)
    _assert_same(source, module, FRESH)
    assert _refused(source, _alone(module), FRESH) > 0


@pytest.mark.parametrize(
    "model",
    [
        cluster.KMeans(4, n_init=1, random_state=0),
        cluster.BisectingKMeans(4, random_state=2),
        cluster.AffinityPropagation(random_state=0),
        cluster.Birch(threshold=0.3, n_clusters=3),
        NearestCentroid(),
    ],
    ids=lambda model: type(model).__name__,
)
def test_centres(model):
    """Rows half-way between two centres."""
    midway = np.concatenate([LATTICE, LATTICE + 0.5, [[1.5, 0.0], [0.0, 1.5], [1.5, 3.0]]])
    refused = 0
    for rows in (SQUARE, np.random.default_rng(0).integers(0, 4, size=(60, 2)).astype(float)):
        source = make_pipeline(StandardScaler(), model).fit(rows, rows[:, 0] > 1.5)
        module = translate(source)
        np.testing.assert_array_equal(module.predict(midway), source.predict(midway))
        refused += _refused(source, _alone(module), midway)
        if hasattr(module, "transform"):  # distances tie, and are what they are
            np.testing.assert_allclose(_alone(module).transform(midway), source.transform(midway), atol=1e-6)
    assert refused > 0


def test_code_words():
    """Whole numbers are summed exactly; thirds are not."""
    rows, classes = RNG.normal(size=(100, 4)), RNG.integers(0, 7, 100)
    fresh = RNG.normal(size=(100, 4))
    for member in (DecisionTreeClassifier(random_state=0), RandomForestClassifier(3, random_state=0)):
        source = OutputCodeClassifier(member, code_size=0.7, random_state=0).fit(rows, classes)
        module = translate(source)
        _assert_same(source, module, fresh)
        assert (_refused(source, _alone(module), fresh) > 0) == isinstance(member, RandomForestClassifier)


def test_nearest_centroids_midway_are_refused():
    source = NearestCentroid().fit([[-1.0], [1.0], [1.0], [3.0]], list("aabb"))
    alone = _alone(translate(source))
    with pytest.raises(UndecidedError, match=r"rows 1 \(1 in all\) are equally near"):
        alone.predict([[0.5], [1.0], [1.5]])
    np.testing.assert_allclose(alone.predict_proba([[1.0]]), source.predict_proba([[1.0]]))


def test_inverse_distances_that_are_rounding_alone():
    """A source that expands squares finds a training row of large numbers at some distance of itself."""
    rows = np.repeat(RNG.normal(size=(20, 2)), 2, axis=0) + 1e4
    source = KNeighborsRegressor(3, weights="distance", algorithm="brute").fit(rows, RNG.normal(size=40))
    module = translate(source)
    np.testing.assert_allclose(module.predict(rows), source.predict(rows), rtol=1e-9)
    with pytest.raises(UndecidedError):
        _alone(module).predict(rows)


def test_level_votes_of_inverse_distances():
    source = KNeighborsClassifier(4, weights="distance").fit([[0.1], [0.3], [0.7], [0.9]], [0, 1, 0, 1])
    alone = _alone(translate(source))
    with pytest.raises(UndecidedError):
        alone.predict([[0.5]])
    assert alone.predict([[0.45]]) == source.predict([[0.45]])


def test_equal_values_need_no_decision():
    """Any choice between neighbours of one class gives the same answer."""
    rows = np.repeat(LATTICE, 3, axis=0)
    source = KNeighborsClassifier(2).fit(rows, np.repeat(np.arange(25), 3))
    _assert_same(source, _alone(translate(source)), LATTICE)


def test_all_samples_are_no_choice():
    source = KNeighborsRegressor(2).fit([[0.0], [2.0]], [1.0, 5.0])
    assert _alone(translate(source)).predict([[1.0]]).tolist() == [3.0]


def test_the_source_is_not_asked_without_ties():
    source = KNeighborsClassifier(3).fit(X, CLASSES)
    module = translate(source)
    wanted = source.predict_proba(FRESH)
    module.reference = None
    np.testing.assert_allclose(module.predict_proba(FRESH), wanted)


def test_blocks_of_samples_and_of_rows(monkeypatch):
    source = _bins(KNeighborsClassifier(3)).fit(X, CLASSES)
    module = translate(source)
    few = FRESH[:50]
    with pytest.raises(UndecidedError) as whole:
        _alone(module).predict(np.tile(few, (90, 1)))
    refused = {number for number, row in enumerate(few) if _refused(source, _alone(module), row[None])}
    assert {row % len(few) for row in whole.value.rows} <= refused
    monkeypatch.setattr(neighbors, "SAMPLES_PER_BLOCK", 16)
    assert {number for number, row in enumerate(few) if _refused(source, _alone(module), row[None])} == refused


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("model", [KNeighborsClassifier(3), KNeighborsRegressor(3, weights="distance")], ids=repr)
def test_files_refuse_ties_and_answer_the_rest(model, tmp_path):
    source = make_pipeline(StandardScaler(), model).fit(LATTICE, np.arange(25) * 7 % 3)
    module = translate(source)
    methods = [method for method in METHODS if hasattr(source, method)]
    artifact.save(module, tmp_path / "folder")
    export_pt2(module, tmp_path / "m.pt2", methods=methods)
    export_onnx(module, tmp_path / "m.onnx", methods=methods)
    for loaded in (
        artifact.load(tmp_path / "folder"),
        load_pt2(tmp_path / "m.pt2"),
        load_onnx(tmp_path / "m.onnx", num_threads=1),
    ):
        _assert_same(source, loaded, FRESH[:, :2])
        assert _refused(source, loaded, LATTICE + 0.5) > 0
        with pytest.raises(InvalidInputError, match="only the source's own search decides"):
            loaded.predict(LATTICE + 0.5)


def test_a_trained_module_has_no_source_to_agree_with(tmp_path):
    source = make_pipeline(StandardScaler(), KNeighborsRegressor(3, weights="distance")).fit(np.trunc(X), TARGETS)
    module = translate(source)
    with torch.no_grad():
        next(module.parameters()).add_(0.5)
    own = module.predict(np.trunc(FRESH))
    assert not np.allclose(own, source.predict(np.trunc(FRESH)))
    artifact.save(module, tmp_path)
    np.testing.assert_allclose(artifact.load(tmp_path).predict(np.trunc(FRESH)), own)


def test_fine_tuning_goes_on_as_before():
    source = make_pipeline(StandardScaler(), KNeighborsClassifier(3, weights="distance")).fit(np.trunc(X), CLASSES)
    tuned = fine_tune(
        translate(source), np.trunc(X), CLASSES, eval_set=(np.trunc(FRESH), RNG.integers(0, 3, 150)), epochs=1
    )
    assert tuned.module.predict(np.trunc(FRESH)).shape == (150,)


def test_copies_keep_the_source():
    source = _bins(KNeighborsClassifier(3)).fit(X, CLASSES)
    module = translate(source)
    assert copy.deepcopy(module).reference is module.reference
    _assert_same(source, pickle.loads(pickle.dumps(module)), FRESH)
    _assert_same(source, translate(source, dtype=torch.float32), FRESH)


def test_a_later_fit_of_the_source_changes_no_answer_of_its_module():
    source = KNeighborsClassifier(4).fit(LATTICE, LATTICE.sum(axis=1) % 2)
    module = translate(source)
    before = source.predict_proba(LATTICE + 0.5)
    source.fit(LATTICE, LATTICE.sum(axis=1) > 4)
    np.testing.assert_array_equal(module.predict_proba(LATTICE + 0.5), before)
