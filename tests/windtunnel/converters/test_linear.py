"""Linear models answer as their sources do, whatever their loss, labels and targets."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.linear import logistic_regression
from mlsys_windtunnel.convert.translation import translate
from sklearn import linear_model
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.svm import LinearSVC, LinearSVR

pytestmark = pytest.mark.filterwarnings("ignore")

RNG = np.random.default_rng(7)
X, FRESH = RNG.normal(size=(80, 5)), RNG.normal(size=(33, 5)) * 2
Y = X @ [1.0, -2, 0.5, 0, 3] + 0.7 + 0.1 * RNG.normal(size=80)
TABLE = np.stack([Y, X[:, 0] - X[:, 1]], axis=1)
LABELS = {
    "numbers": np.digitize(Y, [-2, 2]) * 10,
    "strings": np.array(["low", "middle", "high"])[np.digitize(Y, [-2, 2])],
    "two": np.where(Y > 0, "yes", "no"),
    "booleans": Y > 0,
    "four": np.digitize(Y, [-3.0, 0, 3]).astype(np.int32),
}


REGRESSORS = [
    linear_model.LinearRegression(fit_intercept=False),
    linear_model.LinearRegression(positive=True),
    linear_model.SGDRegressor(random_state=0, average=True),
    LinearSVR(fit_intercept=False),
]


@pytest.mark.parametrize("source", REGRESSORS, ids=repr)
def test_regressors(same_answers, source):
    same_answers(source.fit(X, Y), FRESH)


@pytest.mark.parametrize(
    "source",
    [
        linear_model.LinearRegression(),
        linear_model.MultiTaskLasso(0.01),
        linear_model.OrthogonalMatchingPursuit(n_nonzero_coefs=2),
    ],
    ids=repr,
)
def test_regressors_of_several_outputs(same_answers, source):
    same_answers(source.fit(X, TABLE), FRESH)
    same_answers(source.fit(X, TABLE[:, :1]), FRESH)


@pytest.mark.parametrize(
    "source",
    [
        linear_model.PoissonRegressor(),
        linear_model.GammaRegressor(fit_intercept=False),
        linear_model.TweedieRegressor(power=1.5),
        linear_model.TweedieRegressor(power=0),
        linear_model.TweedieRegressor(power=0, link="log"),
        linear_model.TweedieRegressor(power=2, link="identity", alpha=100),
    ],
    ids=repr,
)
def test_generalised_linear_regressors(same_answers, source):
    same_answers(source.fit(X, np.exp(Y / 5)), FRESH)


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize(
    "source",
    [
        linear_model.LogisticRegression(),
        linear_model.LogisticRegression(solver="saga", l1_ratio=1.0, C=0.5, fit_intercept=False),
        linear_model.LogisticRegressionCV(Cs=2, cv=2, l1_ratios=(0.0,), use_legacy_attributes=False),
        linear_model.RidgeClassifier(),
        linear_model.SGDClassifier(random_state=0, loss="log_loss", penalty="l1"),
        linear_model.SGDClassifier(random_state=0, loss="modified_huber", average=True, alpha=1.0),
        linear_model.SGDClassifier(random_state=0, loss="squared_error", alpha=1.0),
        LinearSVC(multi_class="crammer_singer", fit_intercept=False),
    ],
    ids=repr,
)
def test_classifiers(same_answers, source, labels):
    source.fit(X, LABELS[labels])
    module = same_answers(source, FRESH)
    assert module.classes_.tolist() == source.classes_.tolist()
    assert module.predict(FRESH).dtype.kind == LABELS[labels].dtype.kind
    same_answers(source, FRESH[:1], trained=False)  # the modified Huber link is flat far from the margin


def test_liblinear_is_binary(same_answers):
    source = linear_model.LogisticRegression(solver="liblinear", l1_ratio=1.0).fit(X, LABELS["two"])
    same_answers(source, FRESH)


@pytest.mark.parametrize(("choice", "link"), [("ovr", "one-vs-rest"), ("multinomial", "softmax"), ("auto", "softmax")])
def test_multi_class_of_earlier_versions_chooses_the_link(choice, link):
    class Earlier(linear_model.LogisticRegression):
        def __init__(self, multi_class="auto"):
            super().__init__()
            self.multi_class = multi_class

    source = Earlier(multi_class=choice)
    linear_model.LogisticRegression.fit(source, X, LABELS["strings"])
    assert logistic_regression(source).link == link
    linear_model.LogisticRegression.fit(source, X, LABELS["two"])
    assert logistic_regression(source).link == ("softmax" if choice == "multinomial" else "logistic")


def test_a_row_to_which_no_class_answers_is_uniform(same_answers):
    for loss, far in (("modified_huber", 40.0), ("log_loss", 1e4)):
        source = linear_model.SGDClassifier(loss=loss, random_state=0).fit(X, LABELS["strings"])
        source.coef_, source.intercept_ = np.array([[1.0] * 5, [2.0] * 5, [3.0] * 5]), np.array([-1.0, -2, -3])
        rows = np.vstack([np.full((1, 5), -far), FRESH])
        assert (source.predict_proba(rows)[0] == 1 / 3).all()
        same_answers(source, rows)


def test_margins_of_exactly_zero(same_answers):
    points, labels = np.array([[-1.0], [1.0]]), ["no", "yes"]
    for source in (LinearSVC(), linear_model.RidgeClassifier(), linear_model.LogisticRegression()):
        source.fit(points, labels)
        source.coef_, source.intercept_ = np.array([[2.0]]), np.array([-1.0])
        module = same_answers(source, np.array([[0.5], [0.25], [0.75]]))
        assert module.predict([[0.5]]).tolist() == ["no"]


def test_equal_scores_go_to_the_first_class(same_answers):
    source = LinearSVC().fit(X, LABELS["strings"])
    source.coef_, source.intercept_ = np.zeros((3, 5)), np.array([0.0, 1.0, 1.0])
    assert same_answers(source, FRESH, trained=False).predict(FRESH[:1]).tolist() == [source.classes_[1]]


def test_ridge_of_a_table_of_labels(same_answers):
    source = linear_model.RidgeClassifier().fit(X, (TABLE > 0).astype(int))
    same_answers(source, FRESH)
    same_answers(linear_model.RidgeClassifierCV().fit(X, (TABLE > 0).astype(int)), FRESH)


def test_ridge_of_a_sparse_table_of_labels_is_refused():
    source = linear_model.RidgeClassifier().fit(X, scipy.sparse.csr_matrix((TABLE > 0).astype(int)))
    with pytest.raises(InvalidInputError, match="RidgeClassifier"):
        translate(source)


def test_a_single_class_where_fit_allows_it(same_answers):
    same_answers(linear_model.RidgeClassifier().fit(X, ["only"] * 80), FRESH)


def test_sparse_coefficients_and_sparse_input(same_answers):
    rows = scipy.sparse.random(80, 5, 0.5, random_state=0, format="csr")
    source = linear_model.SGDClassifier(random_state=0).fit(rows, LABELS["strings"]).sparsify()
    same_answers(source, rows)
    same_answers(linear_model.Lasso(0.01).fit(rows, Y), rows)


def test_outliers_by_sgd(same_answers):
    source = linear_model.SGDOneClassSVM(random_state=0, nu=0.3).fit(X)
    assert set(source.predict(FRESH)) == {1, -1}
    same_answers(source, FRESH)
    source.coef_, source.offset_ = np.array([1.0, 0, 0, 0, 0]), np.array([1.0])
    module = same_answers(source, np.eye(5))
    assert module.predict(np.eye(5)).tolist() == [1, -1, -1, -1, -1], "a margin of zero is an inlier"


def test_ransac_answers_as_the_regressor_it_kept(same_answers):
    same_answers(linear_model.RANSACRegressor(random_state=0).fit(X, Y), FRESH)
    same_answers(linear_model.RANSACRegressor(random_state=0).fit(X, TABLE), FRESH)
    scaled = make_pipeline(StandardScaler(), linear_model.Ridge())
    same_answers(linear_model.RANSACRegressor(scaled, min_samples=30, random_state=0).fit(X, Y), FRESH)


def _halved(x):
    return x / 2


def test_ransac_over_what_cannot_be_translated_is_refused():
    inner = make_pipeline(FunctionTransformer(_halved), linear_model.Ridge())
    with pytest.raises(InvalidInputError, match="RANSACRegressor"):
        translate(linear_model.RANSACRegressor(inner, min_samples=30, random_state=0).fit(X, Y))
