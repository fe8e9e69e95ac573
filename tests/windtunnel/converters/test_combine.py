"""Meta-estimators: each answers as its source, with members of any kind, in the network or on the host."""

from __future__ import annotations

import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.export.artifact import load, save
from mlsys_windtunnel.export.pt2 import export_pt2, load_pt2
from mlsys_windtunnel.parse.graph import Kind
from mlsys_windtunnel.parse.pipeline import parse_pipeline
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import (
    AdaBoostClassifier,
    AdaBoostRegressor,
    BaggingClassifier,
    BaggingRegressor,
    StackingClassifier,
    StackingRegressor,
    VotingClassifier,
    VotingRegressor,
)
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import (
    LinearRegression,
    LogisticRegression,
    Perceptron,
    Ridge,
    RidgeClassifier,
    SGDClassifier,
)
from sklearn.model_selection import FixedThresholdClassifier, GridSearchCV, TunedThresholdClassifierCV
from sklearn.multiclass import OneVsOneClassifier, OneVsRestClassifier, OutputCodeClassifier
from sklearn.multioutput import ClassifierChain, MultiOutputClassifier, MultiOutputRegressor, RegressorChain
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.svm import LinearSVC
from sklearn.tree import DecisionTreeClassifier

RNG = np.random.default_rng(0)
X = RNG.normal(size=(150, 4))
FRESH = RNG.normal(size=(80, 4)) * 2
LATENT = X @ [1.0, -1, 0.5, 0] + RNG.normal(size=150) * 0.5
CLASSES = {
    2: np.where(LATENT > 0.2, "yes", "no"),
    3: np.array(["low", "mid", "top"])[np.digitize(LATENT, [-0.7, 0.9])],
    4: np.digitize(LATENT, [-1.0, 0.0, 1.0]) * 3 + 1,
}
LABELS = np.stack([LATENT > 0, X[:, 1] > 0.3, X[:, 2] + X[:, 0] > 0], axis=1).astype(int)
VALUES = np.stack([LATENT, X[:, 1] * 2 + LATENT, X[:, 3]], axis=1)


class Mean(ClassifierMixin, BaseEstimator):
    """A classifier of the user's own, which nothing can translate."""

    def fit(self, x, y):
        self.classes_ = np.unique(y)
        self.n_features_in_ = np.shape(x)[1]
        self.centres_ = np.stack([np.asarray(x, float)[np.asarray(y) == label].mean(0) for label in self.classes_])
        return self

    def predict_proba(self, x):
        distance = ((np.asarray(x, float)[:, None] - self.centres_) ** 2).sum(2)
        likelihood = np.exp(-distance)
        return likelihood / likelihood.sum(1, keepdims=True)

    def predict(self, x):
        return self.classes_[self.predict_proba(x).argmax(1)]


def members():
    return [
        ("logistic", make_pipeline(StandardScaler(), LogisticRegression())),
        ("huber", SGDClassifier(loss="modified_huber", random_state=0)),
        ("gone", "drop"),
        ("sharp", LogisticRegression(C=50.0)),
    ]


def regressors():
    return [("ridge", make_pipeline(StandardScaler(), Ridge())), ("gone", "drop"), ("line", LinearRegression())]


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("weights", [None, [2.0, 1.0, 9.0, 0.3]])
@pytest.mark.parametrize("voting", ["hard", "soft"])
def test_voting(same_answers, voting, weights, classes):
    source = VotingClassifier(members(), voting=voting, weights=weights).fit(X, CLASSES[classes])
    same_answers(source, FRESH, trained=voting == "soft")
    same_answers(source, FRESH[:1], trained=voting == "soft")


def test_hard_votes_that_tie_are_for_the_first_class(same_answers):
    parts = [(str(c), LogisticRegression(C=c)) for c in (1e-4, 1e4)]
    source = VotingClassifier(parts).fit(X, CLASSES[3])
    grid = RNG.normal(size=(400, 4)) * 3
    named = np.stack([part.predict(grid) for part in source.estimators_])
    assert (named[0] != named[1]).sum() > 20, "there are ties to break"
    same_answers(source, grid, trained=False)


@pytest.mark.parametrize("weights", [None, [1.0, 5.0, 2.0]])
def test_voting_of_regressors(same_answers, weights):
    same_answers(VotingRegressor(regressors(), weights=weights).fit(X, LATENT), FRESH)


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("passthrough", [False, True])
@pytest.mark.parametrize("method", ["auto", "predict"])
def test_stacking(same_answers, classes, passthrough, method):
    parts = [*members(), ("margin", LinearSVC(random_state=0))]
    source = StackingClassifier(parts, stack_method=method, passthrough=passthrough, cv=2).fit(X, CLASSES[classes])
    same_answers(source, FRESH)


@pytest.mark.parametrize("final", [RidgeClassifier(), VotingClassifier(members(), voting="soft"), Perceptron()])
def test_any_estimator_may_be_the_final_one_of_a_stack(same_answers, final):
    source = StackingClassifier(members(), final_estimator=final, cv=2).fit(X, CLASSES[3])
    same_answers(source, FRESH)


def _features(source, rows):
    module = translate(source)
    np.testing.assert_allclose(module.transform(rows), source.transform(rows), atol=1e-9)
    return module


def test_stacks_and_votes_transform(same_answers, tmp_path):
    stack = StackingClassifier(members(), cv=2).fit(X, CLASSES[3])
    module = _features(stack, FRESH)
    exported = load_pt2(export_pt2(module, tmp_path / "m.pt2", methods=["predict", "transform"]))
    np.testing.assert_allclose(exported.transform(FRESH), stack.transform(FRESH), atol=1e-9)
    assert (exported.predict(FRESH) == stack.predict(FRESH)).all()
    _features(StackingRegressor(regressors(), passthrough=True, cv=2).fit(X, LATENT), FRESH)
    _features(VotingRegressor(regressors()).fit(X, LATENT), FRESH)
    _features(VotingClassifier(members(), voting="hard").fit(X, CLASSES[3]), FRESH)
    _features(make_pipeline(StandardScaler(), VotingClassifier(members(), voting="soft")).fit(X, CLASSES[3]), FRESH)
    deep = VotingClassifier(members(), voting="soft", flatten_transform=False).fit(X, CLASSES[3])
    again = load(save(_features(deep, FRESH), tmp_path / "deep"))
    np.testing.assert_allclose(again.transform(FRESH), deep.transform(FRESH), atol=1e-9)
    with pytest.raises(InvalidInputError, match="flatten_transform=True"):
        export_pt2(again, tmp_path / "deep.pt2", methods=["transform"])


@pytest.mark.parametrize("passthrough", [False, True])
def test_stacks_and_votes_as_steps_are_translated(same_answers, passthrough):
    stack = StackingClassifier(members(), passthrough=passthrough, cv=2)
    for step in (stack, VotingClassifier(members(), voting="soft"), VotingClassifier(members(), voting="hard")):
        module = same_answers(make_pipeline(StandardScaler(), step, Perceptron()).fit(X, CLASSES[3]), FRESH)
        assert not module.frontend.fallbacks


def test_stacking_of_members_fitted_before_passes_their_labels(same_answers):
    parts = [("a", LogisticRegression().fit(X, CLASSES[4])), ("b", RidgeClassifier().fit(X, CLASSES[4]))]
    source = StackingClassifier(parts, stack_method="predict", cv="prefit").fit(X, CLASSES[4])
    assert source.transform(FRESH).max() == 10, "labels, not their indices"
    same_answers(source, FRESH)


@pytest.mark.parametrize("passthrough", [False, True])
def test_stacking_of_regressors(same_answers, passthrough):
    source = StackingRegressor(regressors(), passthrough=passthrough, cv=2).fit(X, LATENT)
    same_answers(source, FRESH)


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("ensemble", [False, True])
@pytest.mark.parametrize("method", ["sigmoid", "isotonic", "temperature"])
@pytest.mark.parametrize("base", [LogisticRegression(), Mean()], ids=["margins", "probabilities"])
def test_calibration(same_answers, base, method, ensemble, classes):
    y = CLASSES[classes]
    if method == "temperature":  # scikit-learn 1.9 takes integer labels for indices in memory: theirs must be 0, 1, ...
        y = np.unique(y, return_inverse=True)[1]
    source = CalibratedClassifierCV(base, method=method, ensemble=ensemble, cv=2).fit(X, y)
    same_answers(source, FRESH)


def test_calibration_by_temperature_answers_with_labels_of_text(same_answers):
    source = CalibratedClassifierCV(LogisticRegression(), method="temperature", cv=2).fit(X, CLASSES[3])
    same_answers(source, FRESH)


def test_calibration_by_temperature_on_numbers_that_are_no_indices_is_refused():
    source = CalibratedClassifierCV(LogisticRegression(), method="temperature", cv=2).fit(X, (X[:, 0] > 0).astype(int))
    source.classes_ = np.array([1, 2])  # a fit on these would read past scikit-learn's array
    with pytest.raises(InvalidInputError, match=r"fitted on the labels \[1, 2\].*LabelEncoder"):
        translate(source)


def test_calibration_of_a_fitted_estimator_makes_one_operator_of_it(same_answers):
    fitted = FrozenEstimator(make_pipeline(StandardScaler(), LogisticRegression()).fit(X, CLASSES[3]))
    source = CalibratedClassifierCV(fitted, ensemble=True, cv=3).fit(X, CLASSES[3])
    assert len(source.calibrated_classifiers_) == 3
    same_answers(source, FRESH)
    assert [operator.kind for operator in parse_pipeline(source).operators].count(Kind.PREDICT) == 1


def test_calibration_where_all_is_zero_is_uniform(same_answers):
    source = CalibratedClassifierCV(LinearSVC(random_state=0), method="isotonic", ensemble=False, cv=2)
    for calibrator in source.fit(X, CLASSES[4]).calibrated_classifiers_[0].calibrators:
        calibrator.y_thresholds_[calibrator.X_thresholds_ < 0] = 0.0
        calibrator._build_f(calibrator.X_thresholds_, calibrator.y_thresholds_)
    assert (source.predict_proba(FRESH) == 0.25).all(axis=1).any()
    same_answers(source, FRESH)


def test_calibration_of_folds_that_lack_a_class(same_answers):
    y = np.where(LATENT > 0, 1, 0)
    y[:2] = 2
    order = np.arange(len(y))
    folds = [(order[2:], order[:2]), (order[:100], order[100:])]
    source = CalibratedClassifierCV(Mean(), cv=folds).fit(X, y)
    assert len(source.calibrated_classifiers_[0].estimator.classes_) == 2
    same_answers(source, FRESH)


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("base", [LogisticRegression(), LinearSVC(random_state=0), Mean()], ids=repr)
@pytest.mark.parametrize("max_features", [1.0, 0.5])
def test_bagging(same_answers, base, classes, max_features):
    source = BaggingClassifier(base, n_estimators=4, max_features=max_features, random_state=0)
    same_answers(source.fit(X, CLASSES[classes]), FRESH, trained=base is not Mean and hasattr(base, "C"))


def test_bagging_of_members_that_lack_a_class(same_answers):
    y = np.where(LATENT > 0, "b", "a").astype(object)
    y[:2] = "rare"
    source = BaggingClassifier(make_pipeline(StandardScaler(), LogisticRegression()), 6, random_state=1)
    source.fit(X, y)
    sizes = {len(part.classes_) for part in source.estimators_}
    assert sizes == {2, 3}
    module = translate(source)
    for method in ("predict", "predict_proba", "predict_log_proba"):
        expected, got = getattr(source, method)(FRESH), getattr(module, method)(FRESH)
        assert (got == expected).all() if expected.dtype.kind == "O" else np.allclose(got, expected, atol=1e-9)
    assert not hasattr(module, "decision_function"), "the source's adds tables of different width"


@pytest.mark.parametrize("targets", [LATENT, VALUES], ids=["one", "several"])
def test_bagging_of_regressors(same_answers, targets):
    source = BaggingRegressor(Ridge(), n_estimators=3, max_features=0.7, bootstrap_features=True, random_state=0)
    same_answers(source.fit(X, targets), FRESH)


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("base", [LogisticRegression(), RidgeClassifier(), Mean(), LinearRegression()], ids=repr)
def test_one_vs_rest(same_answers, base, classes):
    source = OneVsRestClassifier(base).fit(X, CLASSES[classes])
    same_answers(source, FRESH, trained=not isinstance(base, Mean | LinearRegression))


@pytest.mark.parametrize("base", [LogisticRegression(), RidgeClassifier(), Mean()], ids=repr)
def test_one_vs_rest_of_several_labels(same_answers, base):
    source = OneVsRestClassifier(base).fit(X, LABELS)
    same_answers(source, FRESH, trained=not isinstance(base, Mean))


@pytest.mark.filterwarnings("ignore:Label")
def test_one_vs_rest_of_a_label_that_is_always_set(same_answers):
    labels = LABELS.copy()
    labels[:, 1], labels[:, 2] = 1, 0
    same_answers(OneVsRestClassifier(LogisticRegression()).fit(X, labels), FRESH)


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("base", [LogisticRegression(), RidgeClassifier(), Mean(), LinearRegression()], ids=repr)
def test_one_vs_one(same_answers, base, classes):
    source = OneVsOneClassifier(base).fit(X, CLASSES[classes])
    same_answers(source, FRESH, trained=not isinstance(base, Mean))


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("base", [LogisticRegression(), Mean()], ids=repr)
def test_output_code(same_answers, base, classes):
    source = OutputCodeClassifier(base, code_size=3, random_state=0).fit(X, CLASSES[classes])
    same_answers(source, FRESH, trained=False)


def test_output_codes_at_equal_distance(same_answers):
    rows = RNG.normal(size=(2000, 4)) * 2
    for seed in range(4):
        base = DecisionTreeClassifier(max_depth=4, random_state=0)
        source = OutputCodeClassifier(base, code_size=3, random_state=seed).fit(X, CLASSES[4])
        same_answers(source, rows, trained=False)


def test_several_classifiers_side_by_side(same_answers):
    targets = np.stack([CLASSES[2], CLASSES[3]], axis=1)
    source = MultiOutputClassifier(LogisticRegression()).fit(X, targets)
    module = translate(source)
    assert (module.predict(FRESH) == source.predict(FRESH)).all()
    got, expected = module.predict_proba(FRESH), source.predict_proba(FRESH)
    assert [table.shape for table in got] == [(80, 2), (80, 3)]
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-9)
    same_answers(MultiOutputClassifier(RidgeClassifier()).fit(X, LABELS), FRESH, trained=False)
    fallback = MultiOutputClassifier(Mean()).fit(X, targets)
    assert (translate(fallback).predict(FRESH) == fallback.predict(FRESH)).all(), "labels of the host are indices too"


def test_several_regressors_side_by_side(same_answers):
    same_answers(MultiOutputRegressor(Ridge()).fit(X, VALUES), FRESH)
    same_answers(MultiOutputRegressor(Ridge()).fit(X, VALUES[:, :1]), FRESH)


@pytest.mark.parametrize("method", ["predict", "predict_proba", "predict_log_proba", "decision_function"])
@pytest.mark.parametrize("order", [None, [2, 0, 1]])
def test_classifier_chains(same_answers, method, order):
    source = ClassifierChain(LogisticRegression(), order=order, chain_method=method).fit(X, LABELS)
    same_answers(source, FRESH)


def test_a_classifier_chain_of_labels_beyond_two(same_answers):
    targets = np.stack([CLASSES[4], LABELS[:, 1] * 7], axis=1)
    source = ClassifierChain(RidgeClassifier(), cv=2).fit(X, targets)
    module = translate(source)
    np.testing.assert_array_equal(module.predict(FRESH), source.predict(FRESH))
    assert not hasattr(module, "decision_function"), "the source's fails"


@pytest.mark.parametrize("order", [None, [2, 0, 1]])
def test_regressor_chains(same_answers, order):
    same_answers(RegressorChain(Ridge(), order=order).fit(X, VALUES), FRESH)


@pytest.mark.parametrize("classes", CLASSES)
def test_boosting_of_other_than_trees(same_answers, classes):
    source = AdaBoostClassifier(LogisticRegression(), n_estimators=5, random_state=0).fit(X, CLASSES[classes])
    same_answers(source, FRESH)


def test_boosting_of_regressors(same_answers):
    source = AdaBoostRegressor(Ridge(alpha=30), n_estimators=6, random_state=0).fit(X, LATENT)
    assert len(source.estimators_) > 3
    same_answers(source, FRESH)


@pytest.mark.parametrize("response", ["auto", "predict_proba", "decision_function"])
@pytest.mark.parametrize("threshold", ["auto", 0.3])
@pytest.mark.parametrize("positive", ["yes", "no"])
def test_fixed_thresholds(same_answers, positive, threshold, response):
    source = FixedThresholdClassifier(
        LogisticRegression(), threshold=threshold, pos_label=positive, response_method=response
    )
    same_answers(source.fit(X, CLASSES[2]), FRESH)


def test_tuned_thresholds(same_answers):
    y = (LATENT > 1).astype(int)
    source = TunedThresholdClassifierCV(make_pipeline(StandardScaler(), LogisticRegression()), scoring="f1").fit(X, y)
    same_answers(source, FRESH)
    margins = TunedThresholdClassifierCV(RidgeClassifier(), scoring="balanced_accuracy").fit(X, y)
    same_answers(margins, FRESH)


def test_a_fixed_threshold_on_a_fitted_estimator_needs_no_fit():
    y = (LATENT > 0).astype(int)
    source = FixedThresholdClassifier(LogisticRegression().fit(X, y), threshold=0.8)
    np.testing.assert_array_equal(translate(source).predict(FRESH), source.predict(FRESH))


def test_a_frozen_transformer_and_a_search_are_what_they_hold(same_answers):
    scaler = FrozenEstimator(StandardScaler().fit(X))
    search = GridSearchCV(CalibratedClassifierCV(LogisticRegression(), cv=2), {"estimator__C": [0.1, 1]}, cv=2)
    module = same_answers(make_pipeline(scaler, search).fit(X, CLASSES[2]), FRESH)
    assert module.frontend.is_trivial


def nested():
    calibrated = CalibratedClassifierCV(LogisticRegression(), cv=2)
    voting = VotingClassifier([("a", calibrated), ("b", LogisticRegression())], voting="soft")
    tuned = FixedThresholdClassifier(LogisticRegression(), threshold=0.4, pos_label=1)
    return {
        "voting of bagging": VotingClassifier(
            [("a", BaggingClassifier(Perceptron(), 3)), ("b", voting)], voting="soft"
        ),
        "stacking of voting": StackingClassifier([("v", voting), ("o", OneVsRestClassifier(Perceptron()))], cv=2),
        "stacking in stacking": StackingClassifier(
            [("s", StackingClassifier([("v", voting)], LogisticRegression(), cv=2)), ("l", LinearSVC())],
            final_estimator=voting,
            cv=2,
        ),
        "one-vs-rest of calibrated": OneVsRestClassifier(calibrated),
        "hard vote of joins": VotingClassifier(
            [
                ("t", tuned),
                ("o", OneVsOneClassifier(Perceptron())),
                ("c", OutputCodeClassifier(LinearSVC(), code_size=4)),
            ]
        ),
        "boosting of bagging": AdaBoostClassifier(BaggingClassifier(LinearSVC(), 2), n_estimators=2),
        "calibrated bagging": CalibratedClassifierCV(BaggingClassifier(LinearSVC(), 2), cv=2),
    }


@pytest.mark.parametrize("name", nested())
def test_nested_at_will(same_answers, name):
    source = make_pipeline(StandardScaler(), nested()[name]).fit(X, (LATENT > 0.1).astype(int))
    module = same_answers(source, FRESH, trained="hard" not in name)
    assert module.frontend.is_trivial


@pytest.fixture
def frame() -> pd.DataFrame:
    return pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "c": RNG.choice(["x", "y", "z"], len(X))})


def with_text(model):
    columns = ColumnTransformer([("n", StandardScaler(), ["a", "b"]), ("t", OneHotEncoder(), ["c"])])
    return make_pipeline(columns, model)


@pytest.mark.parametrize("classes", CLASSES)
def test_members_on_text_and_fallback_members(same_answers, frame, classes):
    fallback = make_pipeline(ColumnTransformer([("n", StandardScaler(), ["a"])]), Mean())
    parts = [("text", with_text(LogisticRegression())), ("fallback", fallback)]
    for source in (VotingClassifier(parts, voting="soft"), StackingClassifier(parts, cv=2), VotingClassifier(parts)):
        module = same_answers(
            source.fit(frame, CLASSES[classes]), frame, trained=getattr(source, "voting", "") != "hard"
        )
        assert [name.rpartition(".")[2] for name in module.frontend.fallbacks] == ["StandardScaler", "Mean"]
        assert any(type(part).__name__ == "ElementwiseAffine" for part in module.modules()), "the text member's scaler"


class OnArrays(Mean):
    """Takes text by index, so nothing with names."""

    def fit(self, x, y):
        return super().fit(self._code(x), y)

    def predict_proba(self, x):
        return super().predict_proba(self._code(x))

    def _code(self, x):
        assert isinstance(x, np.ndarray), type(x)
        return np.where(x[:, 2:] == "x", 1.0, 0.0)


def test_bagging_hands_its_members_an_array(same_answers, frame):
    same_answers(BaggingClassifier(OnArrays(), n_estimators=2).fit(frame, CLASSES[2]), frame, trained=False)
    by_index = make_pipeline(ColumnTransformer([("n", StandardScaler(), [0, 1])]), LogisticRegression())
    same_answers(BaggingClassifier(by_index, n_estimators=2).fit(frame, CLASSES[2]), frame)


def test_a_join_that_a_fallback_estimator_reads_runs_on_the_host(same_answers):
    inner = VotingClassifier([("a", LogisticRegression()), ("b", RidgeClassifier())])
    stack = StackingClassifier([("v", inner), ("l", LogisticRegression())], final_estimator=Mean(), cv=2)
    source = VotingClassifier([("stack", stack), ("line", LogisticRegression())], voting="soft").fit(X, CLASSES[3])
    module = same_answers(source, FRESH)
    assert not module.frontend.is_trivial
    again = pickle.loads(pickle.dumps(module))
    np.testing.assert_array_equal(again.predict_proba(FRESH), module.predict_proba(FRESH))


def test_ensembles_of_trees_are_left_to_their_own_converter():
    source = BaggingClassifier(n_estimators=2, random_state=0).fit(X, CLASSES[2])
    (operator,) = parse_pipeline(source).operators
    assert operator.kind is Kind.PREDICT


def test_a_vote_of_members_with_labels_of_their_own_stays_one_operator():
    frozen = FrozenEstimator(LogisticRegression().fit(X, CLASSES[4]))
    source = VotingClassifier([("frozen", frozen), ("other", LogisticRegression())]).fit(X, CLASSES[4])
    (operator,) = parse_pipeline(source).operators
    assert operator.kind is Kind.PREDICT


def test_a_joined_module_needs_no_scikit_learn(answer_alone):
    parts = [("c", CalibratedClassifierCV(LinearSVC(), method="isotonic", cv=2)), ("o", LogisticRegression())]
    source = StackingClassifier(parts, cv=2).fit(X, CLASSES[3])
    np.testing.assert_allclose(answer_alone(translate(source), FRESH), source.predict_proba(FRESH), atol=1e-12)


def test_a_joined_network_can_be_exported():
    parts = [("c", CalibratedClassifierCV(LinearSVC(), cv=2)), ("b", BaggingClassifier(LogisticRegression(), 2))]
    voting = VotingClassifier([*parts, ("o", OneVsRestClassifier(LogisticRegression()))], voting="soft")
    module = translate(voting.fit(X, CLASSES[3]))
    rows = torch.from_numpy(FRESH)
    exported = torch.export.export(module, (rows,), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    torch.testing.assert_close(exported.module()(rows[:7]), module(rows[:7]))


@pytest.mark.parametrize("join", [OneVsRestClassifier, OneVsOneClassifier, FixedThresholdClassifier])
def test_scores_at_the_threshold_fall_on_the_same_side(same_answers, join):
    x = RNG.integers(-3, 4, size=(200, 2)).astype(float)
    options = {"threshold": 0.0} if join is FixedThresholdClassifier else {}
    source = join(Perceptron(), **options).fit(x, np.where(x[:, 0] > x[:, 1], 1, 0))
    for member in getattr(source, "estimators_", [getattr(source, "estimator_", None)]):
        member.coef_, member.intercept_ = np.array([[1.0, -1.0]]), np.array([0.0])
    assert (x[:, 0] == x[:, 1]).sum() > 10, "there are ties"
    same_answers(source, x, trained=False)
