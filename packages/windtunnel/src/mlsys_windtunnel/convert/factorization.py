"""Our own factorisation estimators."""

from __future__ import annotations

from typing import Any

from mlsys_windtunnel.convert.registry import Converted, Converters, Unsupported
from mlsys_windtunnel.host.lookup import SEARCHABLE, CategoryLookup, Vocabulary
from mlsys_windtunnel.modules.base import Classifier, OperatorModule, Regressor
from mlsys_windtunnel.modules.linear.factorization import FactorizationMachine, IdFactorization

CONVERTERS = Converters()


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
