"""The typed graph of operators: what parsing a fitted pipeline produces and the exact and soft executors will run.

Plain data. Each operator carries the fitted estimator it came from, for the converters; all else is known without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from mlsys_core.graphs import Graph, new_graph

from mlsys_windtunnel.checks.table import InputRules

METHODS = ("predict", "labels", "predict_proba", "predict_log_proba", "decision_function")
"""Answers that may flow on from a predictor within the graph, in the order in which several stand side by side.

Each is a method of the estimator, but for classifiers ``predict`` gives the indices of the labels in ``classes_`` and
``labels`` the labels themselves, which must be numbers. ``decision_function`` is last: its width is not always known.
"""


class Kind(Enum):
    """Effect of an operator on the rows it is given."""

    SELECT = "select"  # takes some columns of the input
    CONCATENATE = "concatenate"  # puts its inputs side by side
    UNSTORED = "unstored"  # makes missing what a sparse table does not store, as XGBoost reads it
    SCALE = "scale"  # multiplies by a constant (transformer_weights of scikit-learn)
    TRANSFORM = "transform"  # a fitted transformer
    PREDICT = "predict"  # a fitted predictor: classifier, regressor, clusterer, outlier detector
    COMBINE = "combine"  # a meta-estimator's own part: makes one prediction of its members' answers


@dataclass(frozen=True, slots=True)
class Value:
    """Table that flows along an edge: [rows, width]."""

    name: str  # unique in the graph: the operator that makes it, or "input"
    width: int | None  # columns; None where the fitted estimator does not tell
    is_sparse: bool | None = field(default=False, compare=False)  # of a dense input; None: only a run tells


@dataclass(frozen=True, slots=True)
class Operator:
    """One step of the pipeline."""

    name: str  # where it stands in the pipeline, e.g. "columns/numbers/scale"
    kind: Kind
    inputs: tuple[Value, ...]
    output: Value
    source: str | None = None  # the estimator's class, "sklearn.preprocessing.StandardScaler"; None: no estimator
    columns: tuple[int, ...] | None = None  # SELECT: indices in the input
    labels: tuple[str, ...] | None = None  # SELECT: their names, by which it is done in a frame that a step made
    weight: float | None = None  # SCALE: the constant
    drops_names: bool = False  # SELECT: what is selected becomes an array, as the meta-estimator hands it on
    is_flat: bool = False  # SELECT: one column as [rows], which is how tokenisers take it, not as a table of one column
    methods: tuple[str, ...] = ()  # PREDICT, COMBINE within the graph: the answers that flow on, side by side
    guards: tuple[Value, ...] = ()  # COMBINE: the input of the meta-estimator, which may look at it itself
    estimator: object | None = field(default=None, repr=False, compare=False)  # fitted; the caller's own


@dataclass(frozen=True, slots=True)
class PipelineGraph:
    """A fitted pipeline as a DAG with one input and one output."""

    input: Value
    columns: tuple[str, ...] | None  # the input's column names, where the pipeline was fitted on named columns
    operators: tuple[Operator, ...]  # in an order in which each comes after what it reads
    output: Value
    rules: InputRules = field(default_factory=InputRules)  # the tables that the source takes
    features: tuple[Value, ...] = ()  # ``transform`` of a last predictor that has both, side by side: a stack, a vote
    features_are_deep: bool = False  # or rather one behind another, ``[members, rows, k]``
    composites: Mapping[str, tuple[Value, object]] = field(default_factory=dict, compare=False)
    """By output: what reads which value and makes it whole, where an array is not what the source makes."""

    def to_networkx(self) -> Graph:
        """Return the input and the operators by name; edges are the tables that flow.

        Nodes have ``kind``, ``estimator`` (its class), ``columns`` (of its table, where known), ``methods`` (with
        commas) and ``weight``; edges have ``columns``, ``picked`` (columns that a selection takes: names or positions,
        with commas) and ``is_guard`` (checked, not computed with).
        """
        graph = new_graph("pipeline", color="kind", dashed="is_guard")
        graph.add_node(self.input.name, kind="input", **_columns(self.input))
        for operator in self.operators:
            estimator = operator.source or ""
            does = estimator.rpartition(".")[2] or operator.kind.value
            graph.add_node(
                operator.output.name,
                label=f"{does}\n{operator.name}",
                kind=operator.kind.value,
                estimator=estimator,
                methods=", ".join(operator.methods),
                **({} if operator.weight is None else {"weight": float(operator.weight)}),
                **_columns(operator.output),
            )
            picked = self._picked(operator)
            for value in (*operator.guards, *operator.inputs):
                is_guard = value not in operator.inputs
                graph.add_edge(value.name, operator.output.name, **_columns(value), picked=picked, is_guard=is_guard)
        return graph

    def _picked(self, operator: Operator) -> str:
        """Return the columns that a selection takes: by name where the pipeline's input has names."""
        if operator.columns is None:
            return ""
        is_named = self.columns is not None and operator.inputs[0].name == self.input.name
        return ", ".join(self.columns[place] if is_named and self.columns else str(place) for place in operator.columns)


def _columns(value: Value) -> dict[str, int]:
    return {} if value.width is None else {"columns": value.width}
