"""A fitted scikit-learn estimator to the typed graph of operators.

Pipelines, column transformers and feature unions, nested at will, become edges; any other estimator is one operator.
Reads fitted attributes only: nothing is run on data.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from mlsys_core.errors import InvalidInputError

from mlsys_windtunnel.fitted_size import fitted_size
from mlsys_windtunnel.graph import FittedSize, Kind, Operator, PipelineGraph, Value


def parse_pipeline(estimator: object) -> PipelineGraph:
    """The graph of a fitted estimator.

    Raises:
        InvalidInputError: it is no estimator, or it or a part of it is not fitted.

    Example:
        >>> from sklearn.linear_model import LinearRegression
        >>> from sklearn.pipeline import make_pipeline
        >>> from sklearn.preprocessing import StandardScaler
        >>> fitted = make_pipeline(StandardScaler(), LinearRegression()).fit([[0.0], [1.0]], [0.0, 1.0])
        >>> [operator.name for operator in parse_pipeline(fitted).operators]
        ['standardscaler', 'linearregression']
    """
    if not hasattr(estimator, "get_params") or isinstance(estimator, type):
        raise InvalidInputError(
            f"expected a fitted scikit-learn estimator and got {type(estimator).__name__} {estimator!r:.60}; "
            "save the fitted pipeline object itself"
        )
    _check_fitted(estimator, type(estimator).__name__)
    names = _attribute(estimator, "feature_names_in_")
    width = _attribute(estimator, "n_features_in_")
    parser = _Parser()
    source = Value("input", None if width is None else int(width))
    output = parser.parse(estimator, source, "", is_last=True)
    return PipelineGraph(
        input=source,
        columns=None if names is None else tuple(map(str, names)),
        operators=tuple(parser.operators),
        output=output,
    )


class _Parser:
    """Walks an estimator and collects operators in the order in which they can run."""

    def __init__(self) -> None:
        self.operators: list[Operator] = []

    def parse(self, estimator: Any, source: Value, path: str, *, is_last: bool) -> Value:
        """Add what ``estimator`` does to ``source``; returns what comes out."""
        from sklearn.compose import ColumnTransformer
        from sklearn.pipeline import FeatureUnion, Pipeline
        from sklearn.preprocessing import FunctionTransformer

        if estimator is None or estimator == "passthrough":
            return source
        if type(estimator) is FunctionTransformer and estimator.func is None:  # what a fit makes of "passthrough"
            return source
        if isinstance(estimator, Pipeline):
            value = source
            for name, step in estimator.steps:
                value = self.parse(step, value, _join(path, name), is_last=is_last and step is estimator.steps[-1][1])
            return value
        if (best := vars(estimator).get("best_estimator_")) is not None:  # a parameter search predicts with its best
            return self.parse(best, source, path, is_last=is_last)
        if isinstance(estimator, ColumnTransformer):
            return self._parse_columns(estimator, source, path)
        if isinstance(estimator, FeatureUnion):
            branches = [
                self._weighted(estimator, name, self.parse(part, source, _join(path, name), is_last=False), path)
                for name, part in estimator.transformer_list
                if part != "drop"
            ]
            return self._concatenate(branches, source, path)
        return self._add_leaf(estimator, source, path, is_last=is_last)

    def _parse_columns(self, estimator: Any, source: Value, path: str) -> Value:
        places: dict[str, Any] = estimator._transformer_to_input_indices  # scikit-learn keeps the resolved columns here
        branches = []
        for name, part, _ in estimator.transformers_:
            columns = tuple(int(place) for place in places[name])
            if part == "drop" or not columns:
                continue
            branch = _join(path, name)
            selected = self._add(_join(branch, "select"), Kind.SELECT, (source,), len(columns), columns=columns)
            value = self.parse(part, selected, branch, is_last=False)
            branches.append(self._weighted(estimator, name, value, path))
        return self._concatenate(branches, source, path)

    def _weighted(self, estimator: Any, name: str, value: Value, path: str) -> Value:
        weight = (estimator.transformer_weights or {}).get(name)
        if weight is None:
            return value
        size = FittedSize(num_parameters=1)
        scale = _join(_join(path, name), "weight")
        return self._add(scale, Kind.SCALE, (value,), value.width, weight=float(weight), size=size)

    def _concatenate(self, branches: list[Value], source: Value, path: str) -> Value:
        if len(branches) == 1:
            return branches[0]
        if not branches:  # all dropped: a table of no columns, but with the source's rows
            return self._add(_join(path, "select"), Kind.SELECT, (source,), 0, columns=())
        widths = [value.width for value in branches]
        total = None if None in widths else sum(width for width in widths if width is not None)
        return self._add(_join(path, "concatenate"), Kind.CONCATENATE, tuple(branches), total)

    def _add_leaf(self, estimator: Any, source: Value, path: str, *, is_last: bool) -> Value:
        name = path or type(estimator).__name__.lower()
        _check_fitted(estimator, name)
        predicts = hasattr(estimator, "predict") if is_last else not hasattr(estimator, "transform")
        return self._add(
            name,
            Kind.PREDICT if predicts else Kind.TRANSFORM,
            (source,),
            _width_of_prediction(estimator) if predicts else _width_of_features(estimator),
            source=_public_name(type(estimator)),
            size=fitted_size(estimator),
            estimator=estimator,
        )

    def _add(self, name: str, kind: Kind, inputs: tuple[Value, ...], width: int | None, **fields: Any) -> Value:
        taken = {operator.name for operator in self.operators}
        if name in taken:  # a user's step may be called "select" too
            name = next(numbered for number in count(2) if (numbered := f"{name}-{number}") not in taken)
        output = Value(name, width)
        self.operators.append(Operator(name=name, kind=kind, inputs=inputs, output=output, **fields))
        return output


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _attribute(estimator: object, name: str) -> Any:
    """A fitted attribute, or None; some are properties that ask the first step and raise whatever that raises."""
    try:
        return getattr(estimator, name, None)
    except Exception:  # noqa: BLE001  foreign code
        return None


def _check_fitted(estimator: object, name: str) -> None:
    from sklearn.exceptions import NotFittedError
    from sklearn.utils.validation import check_is_fitted

    try:
        check_is_fitted(estimator)
    except NotFittedError as error:
        raise InvalidInputError(f"{name} is not fitted; call fit before saving it") from error
    except TypeError as error:  # no fit method
        raise InvalidInputError(f"{name}: {error}") from error


def _public_name(source: type) -> str:
    """The class as users import it: "sklearn.preprocessing.StandardScaler", not "sklearn.preprocessing._data...."."""
    parts = source.__module__.split(".")
    private = next((place for place, part in enumerate(parts) if part.startswith("_")), len(parts))
    return ".".join([*parts[:private], source.__qualname__])


def _width_of_features(estimator: Any) -> int | None:
    try:
        return len(estimator.get_feature_names_out())
    except Exception:  # noqa: BLE001  foreign code, and many transformers cannot tell
        return None


def _width_of_prediction(estimator: Any) -> int | None:
    """Columns of ``predict_proba`` for a classifier that has it, else of ``predict``."""
    if hasattr(estimator, "predict_proba"):
        classes = _attribute(estimator, "classes_")
        return len(classes) if classes is not None and _attribute(estimator, "n_outputs_") in (None, 1) else None
    if not estimator.__sklearn_tags__().target_tags.multi_output:
        return 1
    num_outputs = _attribute(estimator, "n_outputs_")
    coefficients = _attribute(estimator, "coef_")
    if num_outputs is None and coefficients is not None:
        num_outputs = coefficients.shape[0] if coefficients.ndim == 2 else 1
    return None if num_outputs is None else int(num_outputs)
