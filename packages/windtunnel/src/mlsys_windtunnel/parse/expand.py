"""Meta-estimators as several nodes of the graph: their members, each a pipeline of its own, and a join of the answers.

So the cut between host and network works through them: a member that cannot be translated runs on the host, and the
others are still trained. Called by :mod:`mlsys_windtunnel.parse.pipeline`; what is asked of each member is in
:mod:`mlsys_windtunnel.parse.members`.
"""

from __future__ import annotations

from typing import Any, Protocol

from mlsys_windtunnel.parse.graph import Kind, Value
from mlsys_windtunnel.parse.members import Composition, composition_of
from mlsys_windtunnel.parse.names import known_name
from mlsys_windtunnel.parse.questions import has_one_output, labels_of


class Builder(Protocol):
    """Collector of operators: the parser."""

    def parse(self, estimator: Any, source: Value, path: str, *, is_last: bool, methods: tuple[str, ...] = ()) -> Value:
        """Add what an estimator does to ``source``; with ``methods``, those answers of it."""
        ...

    def add(self, name: str, kind: Kind, inputs: tuple[Value, ...], width: int | None, **fields: Any) -> Value:
        """Add one operator; its name is made unique."""
        ...

    def note_features(self, values: tuple[Value, ...], *, is_deep: bool = False, is_settled: bool = False) -> None:
        """Keep what stands side by side in the answer of ``transform`` of the estimator that the graph ends in.

        With ``is_deep`` one behind another; with ``is_settled`` no part within notes its own in their place.
        """
        ...


def join(path: str, name: str) -> str:
    """Return the path of a part called ``name``."""
    return f"{path}/{name}" if path else name


def expand(builder: Builder, estimator: Any, source: Value, path: str, methods: tuple[str, ...]) -> Value | None:
    """Add a meta-estimator's members and their join.

    Args:
        builder: Collector to add them to.
        estimator: Any fitted estimator.
        source: Value that it reads.
        path: Path in the pipeline.
        methods: The answers wanted of it; none if it is the last operator, which offers all it has.

    Returns:
        What the join gives; None if the estimator is no meta-estimator known here, and nothing was added.
    """
    composition = composition_of(estimator)
    wanted = {"predict" if method == "labels" else method for method in methods}
    if composition is None or not wanted <= set(composition.answers) or (methods and not has_one_output(estimator)):
        return None
    if composition.drops_names:
        source = _without_names(builder, estimator, source, path)
    if composition.stacked:
        source = _stacked(builder, estimator, composition, source, path)
        if not methods:
            builder.note_features((source,), is_settled=True)
    if composition.passes and wanted <= composition.passes and (methods or not hasattr(estimator, "classes_")):
        (member,) = composition.members
        return builder.parse(member.estimator, source, join(path, member.name), is_last=True, methods=methods)
    answers = (
        _chained(builder, estimator, composition, source, path)
        if composition.is_chain
        else _apart(builder, composition, source, path)
    )
    if composition.transforms and not methods:
        builder.note_features(tuple(answers), is_deep=composition.is_deep)
    return _joined(builder, estimator, composition, answers, source, path, methods)


def expand_features(builder: Builder, estimator: Any, source: Value, path: str) -> Value | None:
    """Add what a stack or a vote answers as a step within a pipeline: its members' answers side by side.

    Returns:
        The table; None if the estimator is neither, and nothing was added.
    """
    composition = composition_of(estimator)
    if composition is None or composition.is_deep or not (composition.stacked or composition.transforms):
        return None
    if composition.stacked:
        return _stacked(builder, estimator, composition, source, path)
    return concatenated(builder, _apart(builder, composition, source, path), join(path, "concatenate"))


def _apart(builder: Builder, composition: Composition, source: Value, path: str) -> list[Value]:
    """Add members that do not read one another's answers; return the answers."""
    answers = []
    for member in composition.members:
        member_path, reads = join(path, member.name), source
        if member.columns is not None:
            select = join(member_path, "select")
            reads = builder.add(select, Kind.SELECT, (source,), len(member.columns), columns=member.columns)
        answers.append(builder.parse(member.estimator, reads, member_path, is_last=True, methods=member.methods))
    return answers


def _joined(
    builder: Builder,
    estimator: Any,
    composition: Composition,
    answers: list[Value],
    source: Value,
    path: str,
    methods: tuple[str, ...],
) -> Value:
    main = "predict_proba" if "predict_proba" in composition.answers else "predict"
    widths = [width_of_answer(estimator, method) for method in methods or (main,)]
    return builder.add(
        path or type(estimator).__name__.lower(),
        Kind.COMBINE,
        tuple(answers),
        None if None in widths else sum(width for width in widths if width is not None),
        source=known_name(type(estimator)),
        methods=methods,
        guards=(source,),
        estimator=estimator,
    )


def _without_names(builder: Builder, estimator: Any, source: Value, path: str) -> Value:
    """Return the input as the meta-estimator hands it on, where it was fitted on a table with names."""
    if not hasattr(estimator, "feature_names_in_"):
        return source
    width = int(estimator.n_features_in_)
    columns = tuple(range(width))
    return builder.add(join(path, "select"), Kind.SELECT, (source,), width, columns=columns, drops_names=True)


def _stacked(builder: Builder, estimator: Any, composition: Composition, source: Value, path: str) -> Value:
    """Return the table that the final estimator of a stack reads."""
    features = []
    for member in composition.stacked:
        member_path = join(path, member.name)
        value = builder.parse(member.estimator, source, member_path, is_last=True, methods=member.methods)
        if member.methods == ("predict_proba",) and len(estimator.classes_) == 2:  # the first is one less the second
            value = builder.add(join(member_path, "select"), Kind.SELECT, (value,), 1, columns=(1,))
        features.append(value)
    if estimator.passthrough:
        features.append(source)
    return concatenated(builder, features, join(path, "concatenate"))


def _chained(builder: Builder, estimator: Any, composition: Composition, source: Value, path: str) -> list[Value]:
    """Return the members' answers in the order of outputs.

    Each member reads the input and the answers of those before it.
    """
    method = getattr(estimator, "chain_method_", "predict")
    reads, answers = [source], []
    for member in composition.members:
        member_path = join(path, member.name)
        table = concatenated(builder, reads, join(member_path, "concatenate"))
        answer = builder.parse(member.estimator, table, member_path, is_last=True, methods=member.methods)
        answers.append(answer)
        if len(member.methods) > 1:
            column = _column_of(member.methods, "labels" if method == "predict" else method)
            answer = builder.add(join(member_path, "select"), Kind.SELECT, (answer,), 1, columns=(column,))
        reads.append(answer)
    indices = {int(output): index for index, output in enumerate(estimator.order_)}
    return [answers[indices[output]] for output in range(len(answers))]


def _column_of(methods: tuple[str, ...], wanted: str) -> int:
    """Return the column of a binary classifier's answer among several: for probabilities, the second class's."""
    start = sum(2 if "proba" in method else 1 for method in methods[: methods.index(wanted)])
    return start + 1 if "proba" in wanted else start


def concatenated(builder: Builder, values: list[Value], name: str) -> Value:
    """Put tables side by side; one stays as it is."""
    if len(values) == 1:
        return values[0]
    widths = [value.width for value in values]
    total = None if None in widths else sum(width for width in widths if width is not None)
    return builder.add(name, Kind.CONCATENATE, tuple(values), total)


def width_of_answer(estimator: Any, method: str) -> int | None:
    """Return the columns of one answer of a fitted predictor; None where it does not tell."""
    classes = labels_of(estimator)
    if method in ("predict", "labels"):
        return 1 if classes is not None else num_outputs(estimator)
    if classes is None:
        return 1 if method in ("decision_function", "score_samples") and not hasattr(estimator, "classes_") else None
    if method != "decision_function":
        return len(classes)
    if len(classes) <= 2:
        return 1
    is_one_vs_one = getattr(estimator, "decision_function_shape", "ovr") == "ovo"
    return len(classes) * (len(classes) - 1) // 2 if is_one_vs_one else len(classes)


def num_outputs(estimator: Any) -> int | None:
    """Return the columns of a ``predict`` that gives no labels."""
    if not estimator.__sklearn_tags__().target_tags.multi_output:
        return 1
    num_outputs = getattr(estimator, "n_outputs_", None)
    coefficients = getattr(estimator, "coef_", None)
    if num_outputs is None and coefficients is not None:
        num_outputs = coefficients.shape[0] if coefficients.ndim == 2 else 1
    return None if num_outputs is None else int(num_outputs)
