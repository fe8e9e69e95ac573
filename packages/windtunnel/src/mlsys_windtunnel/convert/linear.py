"""Linear models (an affine map, and for classifiers and generalised linear models a link) and our factorisations."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError
from torch import nn

from mlsys_windtunnel.convert.registry import Converted, Converters, Unsupported
from mlsys_windtunnel.host.lookup import SEARCHABLE, CategoryLookup, Vocabulary
from mlsys_windtunnel.host.raw_table import raw
from mlsys_windtunnel.modules.base import Classifier, Link, OperatorModule, OutlierDetector, Regressor
from mlsys_windtunnel.modules.columns.preprocess import Elementwise
from mlsys_windtunnel.modules.linear.linear import Affine, FactorizationMachine, IdFactorization, MultilabelMargins
from mlsys_windtunnel.modules.network import Network

CONVERTERS = Converters()

PROBABILISTIC = ("predict", "predict_proba", "predict_log_proba", "decision_function")
SPARSE_LABELS = "a sparse table of labels; fit it on y.toarray()"
MARGINS = ("predict", "decision_function")
OUTLIERS = (*MARGINS, "score_samples")


def class_labels(classes: npt.NDArray[Any]) -> list[object]:
    """Return labels as Python's own values, of which numpy makes the source's dtype again; dates stay numpy's."""
    return list(classes) if classes.dtype.kind in "mM" else classes.tolist()


def affine(estimator: Any, intercept: npt.ArrayLike | None = None) -> Affine:
    """Return the map of an estimator's ``coef_`` (dense or, after ``sparsify``, sparse) and ``intercept_``."""
    return Affine(raw(estimator.coef_), estimator.intercept_ if intercept is None else intercept)


@CONVERTERS.of(
    "sklearn.linear_model",
    "ARDRegression",
    "BayesianRidge",
    "ElasticNet",
    "ElasticNetCV",
    "HuberRegressor",
    "Lars",
    "LarsCV",
    "Lasso",
    "LassoCV",
    "LassoLars",
    "LassoLarsCV",
    "LassoLarsIC",
    "LinearRegression",
    "MultiTaskElasticNet",
    "MultiTaskElasticNetCV",
    "MultiTaskLasso",
    "MultiTaskLassoCV",
    "OrthogonalMatchingPursuit",
    "OrthogonalMatchingPursuitCV",
    "PassiveAggressiveRegressor",
    "QuantileRegressor",
    "Ridge",
    "RidgeCV",
    "SGDRegressor",
    "TheilSenRegressor",
)
@CONVERTERS.of("sklearn.svm", "LinearSVR")
def linear_regressor(estimator: Any) -> OperatorModule:
    """Convert any regressor with ``coef_`` and ``intercept_``; ``coef_`` of two dimensions answers a table."""
    return Regressor(affine(estimator), is_flat=np.ndim(estimator.coef_) == 1)


@CONVERTERS.of("sklearn.linear_model", "GammaRegressor", "PoissonRegressor")
def log_link_regressor(estimator: Any) -> OperatorModule:
    """Convert Poisson and gamma regression: the exponential of an affine map."""
    return Regressor(nn.Sequential(affine(estimator), Elementwise("exp")))


@CONVERTERS.of("sklearn.linear_model", "TweedieRegressor")
def tweedie_regressor(estimator: Any) -> OperatorModule:
    """Convert; with ``link="auto"`` the identity is for powers up to 0, the logarithm beyond."""
    is_log = estimator.link == "log" or (estimator.link == "auto" and estimator.power > 0)
    return log_link_regressor(estimator) if is_log else linear_regressor(estimator)


@CONVERTERS.of("sklearn.linear_model", "PassiveAggressiveClassifier", "Perceptron")
@CONVERTERS.of("sklearn.svm", "LinearSVC")
def margin_classifier(estimator: Any) -> OperatorModule:
    """Convert a classifier without probabilities: perceptron, linear SVM, passive-aggressive."""
    return Classifier(affine(estimator), classes=class_labels(estimator.classes_), link="logistic", answers=MARGINS)


@CONVERTERS.of("sklearn.linear_model", "LogisticRegression", "LogisticRegressionCV")
def logistic_regression(estimator: Any) -> OperatorModule:
    """Convert to a logistic link for two classes, and to a multinomial one for three and more.

    ``multi_class`` is a parameter up to scikit-learn 1.7: there a fit may be one-vs-rest for many classes, and
    multinomial for two, whose single margin stands for two opposite ones.
    """
    choice = estimator.get_params(deep=False).get("multi_class", "deprecated")
    is_binary = len(estimator.classes_) <= 2
    link: Link = "logistic" if is_binary else "softmax"
    if choice == "multinomial":
        link = "softmax"
    elif choice == "ovr" or (estimator.solver == "liblinear" and not is_binary):
        link = "logistic" if is_binary else "one-vs-rest"
    return Classifier(affine(estimator), classes=class_labels(estimator.classes_), link=link, answers=PROBABILISTIC)


@CONVERTERS.of("sklearn.linear_model", "SGDClassifier")
def sgd_classifier(estimator: Any) -> OperatorModule:
    """Convert; probabilities are for the logistic and the modified Huber loss only, one-vs-rest."""
    links: dict[str, Link] = {"log_loss": "one-vs-rest", "modified_huber": "modified-huber"}
    link = links.get(estimator.loss)
    return Classifier(
        affine(estimator),
        classes=class_labels(estimator.classes_),
        link=link or "one-vs-rest",
        answers=PROBABILISTIC if link else MARGINS,
    )


@CONVERTERS.of("sklearn.linear_model", "RidgeClassifier", "RidgeClassifierCV")
def ridge_classifier(estimator: Any) -> OperatorModule | Unsupported:
    """Convert binary and multiclass as other margins; a table of labels gives a margin for each."""
    binarizer = estimator._label_binarizer  # the only place where the kind of target is kept
    if not binarizer.y_type_.startswith("multilabel"):
        return margin_classifier(estimator)
    if binarizer.sparse_input_:
        return Unsupported(SPARSE_LABELS)
    return MultilabelMargins(affine(estimator), answers=MARGINS)


@CONVERTERS.of("sklearn.linear_model", "SGDOneClassSVM")
def sgd_one_class_svm(estimator: Any) -> OperatorModule:
    """Convert to inlier where the margin reaches the offset."""
    offset = float(np.ravel(estimator.offset_)[0])
    return OutlierDetector(affine(estimator, -offset), includes_zero=True, answers=OUTLIERS, offset=offset)


def nested_network(estimator: object) -> Network | None:
    """Translate an inner estimator to a network on the same columns; None if a part of it must run on the host."""
    from mlsys_windtunnel.convert.translation import translate  # here: translation finds the converters by their names

    try:
        module = translate(estimator)
    except InvalidInputError:
        return None
    return module.network if module.frontend.is_trivial else None


@CONVERTERS.of("sklearn.linear_model", "RANSACRegressor")
def ransac_regressor(estimator: Any) -> OperatorModule | Unsupported:
    """Convert the regressor that was fitted on the inliers, if it can be translated whole."""
    network = nested_network(estimator.estimator_)
    if network is None or not isinstance(network.output, Regressor):
        return Unsupported(f"estimator={type(estimator.estimator_).__name__}, a part of which stays on the host")
    return Regressor(network, is_flat=network.output.is_flat)


@CONVERTERS.of("mlsys_windtunnel.estimators.factorization_machine", "FactorizationMachineClassifier")
def machine_classifier(estimator: Any) -> OperatorModule:
    """Convert a classifier: logistic for two classes, else a softmax."""
    return Classifier(
        FactorizationMachine(estimator.coef_, estimator.intercept_, estimator.factors_),
        classes=estimator.classes_.tolist(),
        link="logistic" if len(estimator.classes_) == 2 else "softmax",
        answers=("predict", "predict_proba", "predict_log_proba", "decision_function"),
    )


@CONVERTERS.of("mlsys_windtunnel.estimators.factorization_machine", "FactorizationMachineRegressor")
def machine_regressor(estimator: Any) -> OperatorModule:
    """Convert a regressor of one output."""
    return Regressor(FactorizationMachine(estimator.coef_, estimator.intercept_, estimator.factors_))


@CONVERTERS.of("mlsys_windtunnel.estimators.matrix_factorization", "MatrixFactorizationRegressor")
def matrix_factorization(estimator: Any) -> Converted | Unsupported:
    """Convert ids to a look-up on the host; biases and factors are trainable."""
    if not all(categories.dtype.kind in SEARCHABLE for categories in estimator.categories_):
        return Unsupported("ids that are no numbers or texts of one kind; convert the column with astype(str)")
    lookup = CategoryLookup([Vocabulary(categories) for categories in estimator.categories_])
    body = IdFactorization(estimator.intercept_, estimator.tables_)
    return Converted(Regressor(body), lookup, num_codes=len(estimator.tables_))
