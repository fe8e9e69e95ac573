"""Refusals of a fitted estimator, read from its class, its tags and its options.

scikit-learn's tags say whether missing values and sparse data are taken; the tables below say what tags leave out. That
both hold is shown by ``tests/oracles/windtunnel_estimators``, which compares each estimator's refusals with these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import numpy as np

from mlsys_windtunnel.checks.table import InputRules, Objects
from mlsys_windtunnel.checks.values import Contract
from mlsys_windtunnel.parse.boosters import category_columns_of, library_of
from mlsys_windtunnel.parse.functions import name_of_function
from mlsys_windtunnel.parse.graph import Kind, Operator, Value
from mlsys_windtunnel.parse.members import composition_of
from mlsys_windtunnel.parse.names import known_name
from mlsys_windtunnel.parse.questions import is_function, outermost, passes

Bounds = Callable[[Any], tuple[float | None, float | None]]  # a fitted estimator's least and largest number
# Missing values and infinity alike are taken, where missing values are.
_TAKES_INF = (
    "sklearn.ensemble.HistGradientBoosting",
    "sklearn.ensemble.IsolationForest",
    "sklearn.feature_selection.",
    "sklearn.preprocessing.SplineTransformer",
)
_ROUNDS_TO_FLOAT32 = (
    "sklearn.ensemble.ExtraTrees",
    "sklearn.ensemble.GradientBoosting",
    "sklearn.ensemble.RandomForest",
    "sklearn.tree.",
)
# Meta-estimators that look at their input themselves, whatever their members take.
_LOOKS_ITSELF = (
    "sklearn.ensemble.AdaBoostClassifier",
    "sklearn.ensemble.AdaBoostRegressor",
    "sklearn.multioutput.ClassifierChain",
    "sklearn.multioutput.RegressorChain",
)
# By distances, which far from all points are equal but for rounding: then any point may be the nearest.
_BY_DISTANCE = (
    "sklearn.cluster.",
    "sklearn.gaussian_process.",
    "sklearn.kernel_approximation.RBFSampler",
    "sklearn.neighbors.",
    "sklearn.semi_supervised.Label",
)
_FAR = 1e10
_TAKES_ALL = ("sklearn.dummy.", "sklearn.naive_bayes.CategoricalNB")  # the module of the latter looks itself
_OBJECTS: dict[str | None, Objects] = {
    "lightgbm.basic.Booster": "plain",
    **{f"lightgbm.sklearn.LGBM{kind}": "plain" for kind in ("Classifier", "Ranker", "Regressor")},
    "sklearn.naive_bayes.CategoricalNB": "numbers",
    "sklearn.preprocessing.SplineTransformer": "numbers",
    "xgboost.core.Booster": "arrays",
    **{f"xgboost.sklearn.XGB{kind}": "arrays" for kind in ("Classifier", "Ranker", "Regressor")},
    **{f"xgboost.sklearn.XGBRF{kind}": "arrays" for kind in ("Classifier", "Regressor")},
}
_MAKES_DENSE = ("sklearn.cluster.", "sklearn.decomposition.", "sklearn.kernel_approximation.", "sklearn.neighbors.")
_TREES = ("sklearn.ensemble.", "sklearn.tree.")
# Transformers whose sparse tables store what is not 0, and those that change a sparse table cell by cell, missing ones
# too: what is not stored stays so.
_STORES_NO_ZERO = (
    ".CountVectorizer",
    ".KBinsDiscretizer",
    ".OneHotEncoder",
    ".TfidfVectorizer",
    ".RandomTreesEmbedding",
)
_KEEPS_CELLS = (
    "sklearn.feature_selection.",
    *(f"sklearn.preprocessing.{name}Scaler" for name in ("MaxAbs", "Robust", "Standard")),
)


def contract_of(operator: Operator, bounds: Bounds | None = None) -> Contract | None:
    """Return the numbers that an operator's source takes; None where it looks at none itself.

    Args:
        operator: Of the graph.
        bounds: What its converter says of the least and the largest number.
    """
    if operator.kind is Kind.COMBINE:
        if operator.source == "sklearn.multiclass.OutputCodeClassifier":  # nearest code word, of the members' answers
            return Contract(_name(operator.estimator), low=-_FAR, high=_FAR)
        return Contract(_name(operator.estimator)) if operator.source in _LOOKS_ITSELF else None
    if operator.estimator is None or operator.kind not in (Kind.TRANSFORM, Kind.PREDICT):
        return None
    contract = _contract(operator.estimator, bounds or _bounds)
    return None if contract.takes_all else contract


def checked_values(operator: Operator) -> tuple[Value, ...]:
    """Return the values that :func:`contract_of` is about: a meta-estimator's input, or what the operator reads."""
    return operator.guards if operator.source in _LOOKS_ITSELF and operator.guards else operator.inputs


def _contract(estimator: Any, bounds: Bounds) -> Contract:
    source = known_name(type(estimator))
    if source == "sklearn.linear_model.RANSACRegressor":
        return Contract(_name(estimator), takes_nan=True, takes_inf=True)  # the network within looks
    if is_function(estimator) or source.startswith(_TAKES_ALL):
        return Contract(_name(estimator), takes_nan=True, takes_inf=True)
    takes_nan = _takes_nan(estimator, source)
    takes_inf = source.startswith(_TAKES_INF) or library_of(estimator).takes_inf  # of boosters, their trees
    makes_dmatrix = _makes_dmatrix(estimator, source)
    low, high = bounds(estimator)
    farthest = _farthest(estimator, source)
    if farthest is not None:
        low, high = -farthest, farthest
    return Contract(
        _name(estimator),
        takes_nan=takes_nan,
        takes_inf=takes_nan and takes_inf and not makes_dmatrix,
        rounds_to_float32=makes_dmatrix or source.startswith(_ROUNDS_TO_FLOAT32) or _has_trees(estimator),
        low=low,
        high=high,
    )


def _makes_dmatrix(estimator: Any, source: str) -> bool:
    """Return whether XGBoost reads rows as a ``DMatrix``, which refuses infinity: its boosters, and linear models."""
    if source == "xgboost.core.Booster":
        return True
    return source.startswith("xgboost.") and estimator.get_params(deep=False).get("booster") == "gblinear"


def _takes_nan(estimator: Any, source: str) -> bool:
    tags = _tags(estimator)
    if library_of(estimator).takes_nan:
        return True
    takes = tags is not None and bool(tags.allow_nan)
    if source.startswith("sklearn.ensemble.Bagging"):
        return takes and all(_takes_nan(part, known_name(type(part))) for part in estimator.estimators_)
    return takes


def _has_trees(estimator: Any) -> bool:
    """Return whether an ensemble of scikit-learn's trees, which round whatever holds them."""
    members = np.ravel(np.array(getattr(estimator, "estimators_", ()), dtype=object))
    return len(members) > 0 and all(known_name(type(part)).startswith("sklearn.tree.") for part in members)


def _bounds(estimator: Any) -> tuple[float | None, float | None]:
    """Return the least number and the largest of a source whose converter says nothing of them."""
    if getattr(estimator, "kernel", None) in ("chi2", "additive_chi2"):
        return 0.0, None
    return None, None


def _farthest(estimator: Any, source: str) -> float | None:
    """Return the size beyond which distances are lost: its square swallows what tells one point from another."""
    if not source.startswith(_BY_DISTANCE):
        return None
    names = ("cluster_centers_", "centroids_", "subcluster_centers_", "_fit_X", "X_train_", "X_")
    points = next((points for name in names if (points := getattr(estimator, name, None)) is not None), None)
    if points is None or not isinstance(points, np.ndarray) or points.dtype.kind not in "fiu" or not points.size:
        return _FAR
    return _FAR * (1.0 + float(np.nan_to_num(np.abs(points)).max()))


def rules_of(
    estimator: Any, source: Value, operators: Iterable[Operator], framed: Mapping[str, tuple[int, ...]]
) -> InputRules:
    """Return the tables that a fitted pipeline takes.

    Args:
        estimator: The pipeline.
        source: Its input in the graph.
        operators: The graph's.
        framed: By value that is a frame: columns of the input that it has as they are.
    """
    operators = list(operators)
    readers = [operator for operator in operators if operator.estimator is not None]
    by_name, needs_names = _names_rule(estimator)
    looks = [part for part in readers if part.source in _OBJECTS and part.inputs[0].name in {source.name, *framed}]
    takes_sparse, unstored_is_missing = _sparse_rules(source, operators) if readers else (False, False)
    return InputRules(
        estimator=_name(readers[0].estimator) if readers else type(estimator).__name__,
        number_columns=_number_columns(source, operators),
        reads_by_name=by_name,
        reads_as_given=_is_own(outermost(estimator)),
        needs_names=needs_names,
        selected_columns=_selected_columns(source, operators),
        objects=_OBJECTS[looks[0].source] if looks else "any",
        object_columns=framed.get(looks[0].inputs[0].name) if looks else None,
        takes_sparse=takes_sparse,
        category_columns=next(
            (
                indices
                for part in readers
                if source in part.inputs and (indices := category_columns_of(part.estimator)) is not None
            ),
            None,
        ),
        labels_are_names=library_of(outermost(estimator)).labels_are_names,
        takes_tuples=all(library_of(part.estimator).takes_tuples for part in readers if source in part.inputs),
        dense_answers=("score_samples",) if operators and operators[-1].source == "sklearn.decomposition.PCA" else (),
        unstored_is_missing=unstored_is_missing,
        takes_sparse_nan=takes_sparse and not any((part.source or "").startswith(_TREES) for part in readers),
    )


def _is_own(estimator: Any) -> bool:
    """Return whether this is a function of the user's own, which is given what the source is given."""
    return is_function(estimator) and estimator.func is not None and not name_of_function(estimator.func)


def _selected_columns(source: Value, operators: list[Operator]) -> tuple[int, ...] | None:
    """Return the columns of the input that are selected from it; None where an estimator reads all of it."""
    readers = [each for each in operators if source in (*each.inputs, *checked_values(each))]
    if any(each.kind is not Kind.SELECT for each in readers):
        return None
    return tuple(sorted({column for each in readers for column in each.columns or ()}))


def _names_rule(estimator: Any) -> tuple[bool, bool]:
    """Return whether a frame's columns are looked up by name, and whether they must have names."""
    from sklearn.compose import ColumnTransformer
    from sklearn.pipeline import FeatureUnion

    estimator = outermost(estimator)
    if isinstance(estimator, FeatureUnion):
        return _joined([_names_rule(part) for _, part in estimator.transformer_list if not passes(part)])
    if isinstance(estimator, ColumnTransformer):
        used = [columns for _, part, columns in estimator.transformers_ if not _is_dropped(part, columns)]
        return True, any(isinstance(name, str) for columns in used for name in _flat(columns))
    if (columns := getattr(estimator, "_preprocessor", None)) is not None:  # of histograms' trees, for categories
        return _names_rule(columns)
    if library_of(estimator).reads_by_name:
        return True, False
    composition = composition_of(estimator)
    if composition is not None and not composition.drops_names:
        members = composition.stacked or composition.members
        return _joined([_names_rule(member.estimator) for member in members if member.columns is None])
    return False, False


def _joined(rules: list[tuple[bool, bool]]) -> tuple[bool, bool]:
    return bool(rules) and all(by_name for by_name, _ in rules), any(needs for _, needs in rules)


def _is_dropped(part: Any, columns: Any) -> bool:
    return (isinstance(part, str) and part == "drop") or len(list(_flat(columns))) == 0


def _flat(columns: Any) -> Iterable[Any]:
    return (columns,) if isinstance(columns, str | int | np.integer) else _items(columns)


def _items(columns: Any) -> Iterable[Any]:
    if isinstance(columns, slice):
        return [end for end in (columns.start, columns.stop) if end is not None] or [0]
    array = np.asarray(columns, dtype=object)
    return np.flatnonzero(array) if array.size and isinstance(array.flat[0], bool | np.bool_) else list(array.flat)


def _sparse_rules(source: Value, operators: list[Operator]) -> tuple[bool, bool]:
    """Return whether what may be given sparse data takes it, and takes what is not stored for missing, not for 0."""
    sparse = {source.name}
    kept, found = {source.name}, set()  # values in which the input's cells that are not stored are still to be told
    for operator in operators:
        reads = [value.name for value in (*operator.inputs, *operator.guards)]
        if not any(name in sparse for name in reads):
            continue
        if operator.estimator is not None and not _takes_sparse_itself(operator):
            return False, False
        are_kept = [value.name in kept for value in operator.inputs]
        is_missing = operator.kind is Kind.PREDICT and library_of(operator.estimator).unstored_is_missing
        keeps = (operator.source or "").startswith(_KEEPS_CELLS) and _takes_nan(
            operator.estimator, operator.source or ""
        )
        if all(are_kept) and (operator.kind is Kind.SELECT or keeps):
            kept.add(operator.output.name)
        elif is_missing or any(are_kept):
            found |= {is_missing, is_missing and all(are_kept)}
        makes_dense = (operator.source or "").startswith(_MAKES_DENSE) or operator.kind in (Kind.PREDICT, Kind.COMBINE)
        if not makes_dense:
            sparse.add(operator.output.name)
    return len(found) < 2, True in found


def makes_sparse(kind: Kind, inputs: Iterable[Value], estimator: Any) -> bool | None:
    """Return whether an operator makes a sparse table of its inputs that stores no 0; None where only a run tells."""
    if kind in (Kind.PREDICT, Kind.COMBINE, Kind.UNSTORED):
        return False
    states = {value.is_sparse for value in inputs}
    state = None if None in states else True in states
    if kind is not Kind.TRANSFORM:
        return None if kind is Kind.SCALE and state else state
    source = known_name(type(estimator))
    if (
        _is_own(estimator)
        or not source.startswith(("sklearn.", "mlsys_windtunnel."))
        or source.endswith("NeighborsTransformer")
    ):
        return None
    if state is not False:
        return state if source.startswith(_KEEPS_CELLS) else False if source.startswith(_MAKES_DENSE) else None
    makes = any(getattr(estimator, name, False) is True for name in ("sparse", "sparse_output"))
    if makes or getattr(estimator, "encode", "") == "onehot" or source.startswith("sklearn.feature_extraction."):
        return source.endswith(_STORES_NO_ZERO) or None
    return False


def _takes_sparse_itself(operator: Operator) -> bool:
    estimator: Any = operator.estimator
    name = (operator.source or "").rpartition(".")[2]
    if operator.kind is Kind.COMBINE:
        return True
    options: dict[str, Callable[[], bool]] = {
        "Binarizer": lambda: estimator.threshold >= 0,
        "FunctionTransformer": lambda: estimator.validate and estimator.accept_sparse,
        "KNeighborsClassifier": lambda: estimator._fit_method == "brute",
        "KNeighborsRegressor": lambda: estimator._fit_method == "brute",
        "LabelPropagation": lambda: estimator.kernel != "knn",
        "LabelSpreading": lambda: estimator.kernel != "knn",
        "LocalOutlierFactor": lambda: estimator._fit_method == "brute",
        "MissingIndicator": lambda: not _is_zero(estimator.missing_values),
        "RadiusNeighborsClassifier": lambda: estimator._fit_method == "brute",
        "RadiusNeighborsRegressor": lambda: estimator._fit_method == "brute",
        "RobustScaler": lambda: not estimator.with_centering,
        "SimpleImputer": lambda: not _is_zero(estimator.missing_values),
        "StandardScaler": lambda: not estimator.with_mean,
    }
    is_vector_machine = (operator.source or "").startswith("sklearn.svm.") and hasattr(estimator, "_sparse")
    if (is_vector_machine and not estimator._sparse) or (name in options and not options[name]()):
        return False
    tags = _tags(estimator)
    return tags is not None and bool(tags.sparse)


def _is_zero(marker: object) -> bool:
    return isinstance(marker, Real) and marker == 0


def _number_columns(source: Value, operators: list[Operator]) -> tuple[int, ...]:
    """Return columns of the input that a function reads as they are: of numpy's, it takes numbers alone."""
    picked: dict[str, tuple[int, ...]] = {} if source.width is None else {source.name: tuple(range(source.width))}
    found: set[int] = set()
    for operator in operators:
        indices = picked.get(operator.inputs[0].name) if operator.inputs else None
        if indices is None:
            continue
        if operator.kind is Kind.SELECT:
            picked[operator.output.name] = tuple(indices[column] for column in operator.columns or ())
        elif is_function(operator.estimator) and name_of_function(getattr(operator.estimator, "func", None)):
            found.update(indices)  # a function of the user's own stays on the host, and takes what it takes
    return tuple(sorted(found))


def _tags(estimator: Any) -> Any:
    """Return scikit-learn's tags of the input; None of an estimator that has none."""
    from sklearn.utils import get_tags

    try:
        return get_tags(estimator).input_tags
    except Exception:  # noqa: BLE001  third-party code
        return None


def _name(estimator: object) -> str:
    return type(estimator).__name__
