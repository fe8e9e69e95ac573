"""A fitted scikit-learn estimator to the typed graph of operators.

Pipelines, column transformers and feature unions, nested at will, become edges; meta-estimators become their members
and a join (:mod:`mlsys_windtunnel.parse.expand`); any other estimator is one operator. Reads fitted attributes only:
nothing is run on data.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from numbers import Integral
from typing import Any

from mlsys_core.errors import InvalidInputError

from mlsys_windtunnel.parse.boosters import as_estimator, library_of, package_of
from mlsys_windtunnel.parse.expand import concatenated, expand, expand_features, join, num_outputs, width_of_answer
from mlsys_windtunnel.parse.graph import Kind, Operator, PipelineGraph, Value
from mlsys_windtunnel.parse.members import composition_of
from mlsys_windtunnel.parse.names import KNOWN_LIBRARIES, known_name
from mlsys_windtunnel.parse.questions import as_fitted, makes_frames, outermost, passes, within
from mlsys_windtunnel.parse.source import makes_sparse, rules_of


def parse_pipeline(estimator: object) -> PipelineGraph:
    """Parse a fitted estimator into a graph.

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
    estimator = as_estimator(estimator)
    if not hasattr(estimator, "get_params") or isinstance(estimator, type):
        raise InvalidInputError(
            f"expected a fitted scikit-learn estimator and got {type(estimator).__name__} {estimator!r:.60}; "
            "save the fitted pipeline object itself"
        )
    _check_fitted(estimator, type(estimator).__name__)
    names = _column_names(as_fitted(estimator))
    width = _width_of_input(as_fitted(estimator))
    parser = _Parser()
    source = Value("input", width)
    output = parser.parse(estimator, source, "", is_last=True)
    return PipelineGraph(
        input=source,
        columns=None if names is None else tuple(map(str, names)),
        operators=tuple(parser.operators),
        output=output,
        rules=replace(
            rules_of(estimator, source, parser.operators, parser.framed), passed_columns=tuple(sorted(parser.passed))
        ),
        features=parser.features,
        features_are_deep=parser.features_are_deep,
        composites=parser.composites,
    )


class _Parser:
    """Walk of an estimator that collects operators in the order in which they can run."""

    def __init__(self) -> None:
        self.operators: list[Operator] = []
        self.features: tuple[Value, ...] = ()
        self.features_are_deep = False
        self._is_settled = False
        self.composites: dict[str, tuple[Value, object]] = {}
        self.passed: set[int] = set()  # columns of the input that go into an array as they are
        self.framed: dict[str, tuple[int, ...]] = {}  # by value, a frame: columns of the input that it has as they are
        self._names = {"input"}
        self._answers: dict[tuple[int, str, tuple[str, ...]], Value] = {}

    def parse(self, estimator: Any, source: Value, path: str, *, is_last: bool, methods: tuple[str, ...] = ()) -> Value:
        """Add what ``estimator`` does to ``source``; returns what comes out.

        Args:
            estimator: Fitted, or None or "passthrough".
            source: Value that it reads.
            path: Path in the pipeline.
            is_last: True if it predicts when it can: the last operator, or a member of a meta-estimator.
            methods: For a member, the answers wanted of it.
        """
        known = (id(estimator), source.name, methods)  # one fitted estimator may be a member several times
        if methods and known in self._answers:
            return self._answers[known]
        value = self._parse(estimator, source, path, is_last=is_last, methods=methods)
        if methods:
            self._answers[known] = value
        return value

    def _parse(self, estimator: Any, source: Value, path: str, *, is_last: bool, methods: tuple[str, ...]) -> Value:
        from sklearn.compose import ColumnTransformer
        from sklearn.pipeline import FeatureUnion, Pipeline
        from sklearn.preprocessing import FunctionTransformer

        if estimator is None or estimator == "passthrough":
            return source
        is_identity = type(estimator) is FunctionTransformer and estimator.func is None
        if is_identity and not estimator.validate:  # what a fit makes of "passthrough"
            return source
        if isinstance(estimator, Pipeline):
            value = source
            for name, step in estimator.steps:
                if passes(step):
                    continue
                ends = is_last and step is estimator.steps[-1][1]
                value = self.parse(step, value, join(path, name), is_last=ends, methods=methods if ends else ())
            return value
        if (inner := within(estimator)) is not None:
            return self.parse(inner, source, path, is_last=is_last, methods=methods)
        if isinstance(estimator, ColumnTransformer):
            return self._parse_columns(estimator, source, path)
        if isinstance(estimator, FeatureUnion):
            branches = [
                self._weighted(estimator, name, self.parse(part, source, join(path, name), is_last=False), path)
                for name, part in estimator.transformer_list
                if part != "drop"
            ]
            return self._made_by(estimator, self._concatenate(branches, source, path), source)
        if is_last:
            expanded = expand(self, estimator, source, path, methods)
        else:
            expanded = expand_features(self, estimator, source, path)
        return expanded or self._add_leaf(estimator, source, path, is_last=is_last, methods=methods)

    def _parse_columns(self, estimator: Any, source: Value, path: str) -> Value:
        columns_of: dict[str, Any] = (
            estimator._transformer_to_input_indices
        )  # scikit-learn keeps the resolved columns here
        branches: list[Value] = []
        passed: list[int] = []
        for name, part, wanted in estimator.transformers_:
            columns = tuple(int(index) for index in columns_of[name])
            if part == "drop" or not columns:
                continue
            branch = join(path, name)
            if source.name == "input" and (part is None or passes(part)):
                passed += columns
            fields: dict[str, Any] = {"columns": columns, "is_flat": isinstance(wanted, str | Integral)}  # "text"
            if source.name != "input" and hasattr(estimator, "feature_names_in_"):
                fields["labels"] = tuple(map(str, estimator.feature_names_in_[list(columns)]))
            selected = self.add(join(branch, "select"), Kind.SELECT, (source,), len(columns), **fields)
            value = self.parse(part, selected, branch, is_last=False)
            branches.append(self._weighted(estimator, name, value, path))
        value = self._concatenate(branches, source, path)
        value = self._made_by(estimator, value, source)
        if makes_frames(estimator):
            self.framed[value.name] = tuple(passed)
        else:
            self.passed.update(passed)
        return value if getattr(estimator, "sparse_output_", False) else replace(value, is_sparse=False)

    def _made_by(self, estimator: Any, value: Value, source: Value) -> Value:
        """Note the estimator that makes a value whole, where a join of arrays is something else."""
        if value.name != source.name and (value.is_sparse is not False or makes_frames(estimator)):
            self.composites[value.name] = (source, estimator)
        return value

    def _weighted(self, estimator: Any, name: str, value: Value, path: str) -> Value:
        weight = (estimator.transformer_weights or {}).get(name)
        if weight is None:
            return value
        scale = join(join(path, name), "weight")
        return self.add(scale, Kind.SCALE, (value,), value.width, weight=float(weight))

    def _concatenate(self, branches: list[Value], source: Value, path: str) -> Value:
        if not branches:  # all dropped: a table of no columns, but with the source's rows
            return self.add(join(path, "select"), Kind.SELECT, (source,), 0, columns=())
        return concatenated(self, branches, join(path, "concatenate"))

    def _add_leaf(self, estimator: Any, source: Value, path: str, *, is_last: bool, methods: tuple[str, ...]) -> Value:
        name = path or type(estimator).__name__.lower()
        _check_fitted(estimator, name)
        predicts = hasattr(estimator, "predict") if is_last else not hasattr(estimator, "transform")
        if predicts and source.is_sparse is not False and library_of(estimator).unstored_is_missing:
            source = self.add(join(name, "unstored"), Kind.UNSTORED, (source,), source.width)
        return self.add(
            name,
            Kind.PREDICT if predicts else Kind.TRANSFORM,
            (source,),
            _width_of_prediction(estimator, methods) if predicts else _width_of_features(estimator),
            source=known_name(type(estimator)),
            methods=methods,
            estimator=estimator,
        )

    def note_features(self, values: tuple[Value, ...], *, is_deep: bool = False, is_settled: bool = False) -> None:
        """Keep what stands side by side in the answer of ``transform`` of the estimator that the graph ends in.

        With ``is_deep`` one behind another; with ``is_settled`` no part within notes its own in their place.
        """
        if not self._is_settled:
            self.features, self.features_are_deep, self._is_settled = values, is_deep, is_settled

    def add(self, name: str, kind: Kind, inputs: tuple[Value, ...], width: int | None, **fields: Any) -> Value:
        """Add one operator under a name that no other has."""
        if name in self._names:  # a user's step may be called "select" too
            name = next(numbered for number in count(2) if (numbered := f"{name}-{number}") not in self._names)
        self._names.add(name)
        output = Value(name, width, makes_sparse(kind, inputs, fields.get("estimator")))
        self.operators.append(Operator(name=name, kind=kind, inputs=inputs, output=output, **fields))
        return output


def _attribute(estimator: object, name: str) -> Any:
    """Return a fitted attribute, or None; some are properties that raise whatever the first step raises."""
    try:
        return getattr(estimator, name, None)
    except Exception:  # noqa: BLE001  third-party code
        return None


def _width_of_input(estimator: Any) -> int | None:
    """Return the columns of the input; None where the first operators do not tell, as tokenisers do not."""
    width = _attribute(estimator, "n_features_in_")
    if width is not None:
        return int(width)
    if hasattr(estimator, "X_thresholds_"):  # isotonic regression, which may be fitted on numbers alone
        return 1
    parts: Any = getattr(estimator, "steps", None) or getattr(estimator, "transformer_list", None) or ()
    first = next((part for _, part in parts if part is not None and not isinstance(part, str)), None)
    return None if first is None else _width_of_input(as_fitted(first))


def _column_names(estimator: object) -> Any:
    """Return the names of the columns that the pipeline was fitted on; None if they had none."""
    first = outermost(estimator)
    if (known := library_of(first).column_names) is not None:
        return known(first)
    names = _attribute(estimator, "feature_names_in_")
    composition = composition_of(first)
    if names is None and composition is not None and not composition.drops_names:
        of_members = (_column_names(member.estimator) for member in composition.members if member.columns is None)
        return next((found for found in of_members if found is not None), None)
    return names


def _check_fitted(estimator: object, name: str) -> None:
    try:
        is_fitted = _is_fitted(as_fitted(estimator))
    except TypeError as error:  # no fit method
        raise InvalidInputError(f"{name}: {error}") from error
    if not is_fitted:
        raise InvalidInputError(f"{name} is not fitted; call fit first")


def _is_fitted(estimator: Any) -> bool:
    """Return whether an estimator is fitted, as far as it tells: a user's own may keep nothing of its fit."""
    from sklearn.exceptions import NotFittedError
    from sklearn.pipeline import FeatureUnion, Pipeline
    from sklearn.utils.validation import check_is_fitted

    try:
        check_is_fitted(estimator)
    except NotFittedError:
        if isinstance(estimator, Pipeline | FeatureUnion):
            parts = estimator.steps if isinstance(estimator, Pipeline) else estimator.transformer_list
            return all(_is_fitted(as_fitted(part)) for _, part in parts if not passes(part))
        return package_of(estimator) not in KNOWN_LIBRARIES and not library_of(estimator).package
    return True


def _width_of_features(estimator: Any) -> int | None:
    try:
        return len(estimator.get_feature_names_out())
    except Exception:  # noqa: BLE001  third-party code, and many transformers cannot tell
        return None


def _width_of_prediction(estimator: Any, methods: tuple[str, ...]) -> int | None:
    """Return the columns of the wanted answers; if none, of ``predict_proba`` if present, else of ``predict``."""
    if methods:
        widths = [width_of_answer(estimator, method) for method in methods]
        return None if None in widths else sum(width for width in widths if width is not None)
    if hasattr(estimator, "predict_proba"):
        classes = _attribute(estimator, "classes_")
        return len(classes) if classes is not None and _attribute(estimator, "n_outputs_") in (None, 1) else None
    return num_outputs(estimator)
