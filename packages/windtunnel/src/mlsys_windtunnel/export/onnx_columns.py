"""ONNX files that take raw columns by name: look-ups, refusals and labels as nodes round the network.

ONNX cannot raise an error of its own. A refusal is a ``Gather`` whose index is out of bounds where the input is
refused; its name is the message, which runtimes show. Imported by ``onnx.py`` only when there is something to export.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from mlsys_core.errors import InvalidInputError
from onnx import TensorProto, helper, numpy_helper
from onnx.compose import add_prefix

from mlsys_windtunnel.export.host_parts import MISSING_TEXTS, Code, Column, Flags, HostPlan, Numbers, Part, keys_of
from mlsys_windtunnel.export.onnx_rows import ARRAY
from mlsys_windtunnel.host.lookup import is_missing

INNER, OUTER = "network/", "columns/"  # prefixes of the names within
_TYPES = {
    "string": TensorProto.STRING,
    "double": TensorProto.DOUBLE,
    "float": TensorProto.FLOAT,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}
_TREES = "ai.onnx.ml"


@dataclass(frozen=True)
class Output:
    """An answer as the file gives it."""

    name: str
    is_flat: bool  # one number a row
    labels: tuple[Any, ...] = ()  # the answer is an index in them


def with_columns(
    model: onnx.ModelProto, plan: HostPlan, outputs: Sequence[Output], refusals: Sequence[str], *, is_float32: bool
) -> onnx.ModelProto:
    """Return a model whose inputs are the plan's columns and whose outputs are the answers, labels by their names.

    Args:
        model: The network: an input for each table of the plan; outputs, then perhaps rows that tie, then refusals.
        plan: The host's part.
        outputs: The answers, in the model's order; any outputs between them and the refusals stay as they are.
        refusals: Messages, one for each of the last outputs.
        is_float32: The network computes in float32.

    Raises:
        InvalidInputError: a part that ONNX has no operators for.
    """
    model = add_prefix(model, INNER)
    graph = model.graph
    if all(each.domain != _TREES for each in model.opset_import):
        model.opset_import.append(helper.make_opsetid(_TREES, 4))
    writer = _Writer(graph, is_float32=is_float32)
    tables, given = [value.name for value in graph.input], list(graph.output)
    kinds = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    inputs = writer.inputs(plan)
    del graph.input[:]
    graph.input.extend(inputs)
    for part, name in zip(plan.tables, tables, strict=True):
        writer.table(part, name, kinds[name])
    network = list(graph.node)
    del graph.node[:]
    graph.node.extend([*writer.nodes, *network])
    writer.nodes.clear()
    flags = [value.name for value in given[len(given) - len(refusals) :]]
    for flag, message in zip(flags, refusals, strict=True):
        writer.refuse(flag, message)
    kept = given[: len(given) - len(refusals)]
    del graph.output[:]
    for value, output in zip(kept, outputs, strict=False):
        graph.output.append(writer.answer(value, output))
    for value in kept[len(outputs) :]:
        graph.output.append(writer.renamed(value, value.name.removeprefix(INNER)))
    graph.node.extend(writer.nodes)
    model.graph.doc_string = ""
    onnx.checker.check_model(model)
    return model


class _Writer:
    """Writer of the nodes round the network."""

    def __init__(self, graph: onnx.GraphProto, *, is_float32: bool) -> None:
        self.graph = graph
        self.nodes: list[onnx.NodeProto] = []
        self.real = TensorProto.FLOAT if is_float32 else TensorProto.DOUBLE
        self._columns: dict[int, str] = {}  # names of the inputs by the plan's index
        self._types: tuple[Column, ...] = ()
        self._array: str | None = None
        self._numbers: dict[int, str] = {}  # columns as doubles
        self._zeros: list[str] = []  # int64, 0 each: that of a refusal does not come to be
        self._count = 0

    def inputs(self, plan: HostPlan) -> list[onnx.ValueInfoProto]:
        """Return the graph's inputs."""
        self._types = plan.columns
        is_array = not plan.is_named and all(isinstance(part, Numbers) for part in plan.tables)
        if is_array:
            self._array = ARRAY
            self._places = plan.indices
            self._width = plan.width
            return [helper.make_tensor_value_info(ARRAY, TensorProto.DOUBLE, ["rows", plan.width])]
        self._columns = {index: column.name for index, column in enumerate(plan.columns)}
        return [helper.make_tensor_value_info(each.name, _TYPES[each.type], ["rows", 1]) for each in plan.columns]

    def table(self, part: Part, name: str, kind: int) -> None:
        """Write the nodes that make a table of the network's, in its type ``kind``."""
        if isinstance(part, Numbers):
            table, made = self._numbers_of(part), TensorProto.DOUBLE
        elif isinstance(part, Flags):
            table, made = self._flags(part), TensorProto.DOUBLE
        else:
            is_whole = kind == TensorProto.INT64
            columns = [
                self._number(each) if isinstance(each, int) else self._code(each, is_whole=is_whole)
                for each in part.columns
            ]
            table, made = self._joined(columns), TensorProto.INT64 if is_whole else TensorProto.DOUBLE
        if made == TensorProto.DOUBLE and kind == TensorProto.FLOAT:
            narrow = self._node("Cast", table, to=TensorProto.FLOAT)
            new = self._node("And", self._node("IsInf", narrow), self._node("Not", self._node("IsInf", table)))
            self.refuse(self._any(new), "Input X contains a value too large for dtype('float32')")
            table = narrow
        self.nodes.append(helper.make_node("Identity", [table], [name]))

    def refuse(self, flag: str, message: str) -> None:
        """Refuse the input where a truth value without dimensions is true."""
        index = self._node("Cast", flag, to=TensorProto.INT64)
        zero, number = self._name(), len(self._zeros) + 1  # names are unique
        named = f"{message} ({number})" if number > 1 else message
        self.nodes.append(
            helper.make_node("Gather", [self._constant(np.zeros(1, np.int64)), index], [zero], name=named)
        )
        self._zeros.append(zero)

    def answer(self, value: onnx.ValueInfoProto, output: Output) -> onnx.ValueInfoProto:
        """Write the nodes of an answer; the refusals come before it."""
        kind = value.type.tensor_type.elem_type
        name = value.name
        if self._zeros:
            zero = self._summed()
            if kind != TensorProto.INT64:
                zero = self._node("Cast", zero, to=kind)
            name = self._node("Add", name, zero)
        shape: list[Any] = ["rows"]
        if output.is_flat:
            name = self._node("Reshape", name, self._constant(np.array([-1], np.int64)))
        else:
            shape += [each.dim_value or None for each in value.type.tensor_type.shape.dim[1:]]
        if output.labels:
            labels = _labels(output.labels)
            name = self._node("Gather", self._constant(labels), name)
            kind = helper.np_dtype_to_tensor_dtype(labels.dtype) if labels.dtype != object else TensorProto.STRING
        self.nodes.append(helper.make_node("Identity", [name], [output.name]))
        return helper.make_tensor_value_info(output.name, kind, shape)

    def renamed(self, value: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
        """Give an output another name."""
        self.nodes.append(helper.make_node("Identity", [value.name], [name]))
        made = onnx.ValueInfoProto()
        made.CopyFrom(value)
        made.name = name
        return made

    def _numbers_of(self, part: Numbers) -> str:
        if self._array is None:
            return self._joined([self._number(column) for column in part.columns])
        places = [self._places[column] for column in part.columns]
        if places == list(range(self._width)):
            return self._array
        return self._node("Gather", self._array, self._constant(np.array(places, np.int64)), axis=1)

    def _number(self, column: int) -> str:
        if column not in self._numbers:
            name = self._columns[column]
            is_double = self._types[column].type == "double"
            self._numbers[column] = name if is_double else self._node("Cast", name, to=TensorProto.DOUBLE)
        return self._numbers[column]

    def _code(self, code: Code, *, is_whole: bool) -> str:
        column = self._types[code.cells.column]
        keys = keys_of(code, column)
        name, values = self._columns[code.cells.column], list(keys.values())
        if column.type in ("double", "float"):
            number = self._node("Add", self._number(code.cells.column), self._constant(np.zeros(())))  # -0.0 is 0.0
            made = self._labelled(number, np.array(list(keys), np.float64), np.array(values, np.float64), code.unknown)
            kind = TensorProto.DOUBLE
        else:
            if column.type == "bool":
                name = self._node("Cast", name, to=TensorProto.INT64)
            table: npt.NDArray[Any] = np.array(list(keys), object if column.type == "string" else np.int64)
            whole = -1 if code.unknown != code.unknown else int(code.unknown)
            made = self._labelled(name, table, np.array(values, np.int64), whole)
            kind = TensorProto.INT64
            if code.unknown != code.unknown:
                real = self._node("Cast", made, to=TensorProto.DOUBLE)
                lost = self._node("Less", made, self._constant(np.zeros((), np.int64)))
                made, kind = self._node("Where", lost, self._constant(np.array(np.nan)), real), TensorProto.DOUBLE
        if code.unknown == code.unknown:
            self._refuse_unknown(code, column, made, kind)
        elif code.refuses:
            self._refuse_new(code.cells.column, self._node("IsNaN", made))
        wanted = TensorProto.INT64 if is_whole else TensorProto.DOUBLE
        return made if kind == wanted else self._node("Cast", made, to=wanted)

    def _refuse_unknown(self, code: Code, column: Column, made: str, kind: int) -> None:
        if not code.refuses and column.type not in ("double", "float"):
            return
        unknown = np.array(code.unknown, np.float64 if kind == TensorProto.DOUBLE else np.int64)
        is_unknown = self._node("Equal", made, self._constant(unknown))
        if code.refuses:
            message = f"column {column.name} has categories that the encoder was not fitted on"
        else:
            is_unknown = self._node("And", is_unknown, self._node("IsInf", self._number(code.cells.column)))
            message = f"column {column.name} contains infinity, which is no category"
        self.refuse(self._any(is_unknown), message)

    def _refuse_new(self, index: int, is_unknown: str) -> None:
        """Refuse cells of a column that are no category, unless they are missing."""
        name, column = self._columns[index], self._types[index]
        if column.type == "string":
            gaps = [self._node("Equal", name, self._constant(np.array(text, object))) for text in MISSING_TEXTS]
        else:
            gaps = [self._node("IsNaN", self._number(index))] if column.type in ("double", "float") else []
        for gap in gaps:
            is_unknown = self._node("And", is_unknown, self._node("Not", gap))
        self.refuse(self._any(is_unknown), f"Found a category not in the training set for column {column.name}")

    def _labelled(self, name: str, keys: npt.NDArray[Any], values: npt.NDArray[Any], unknown: float) -> str:
        made = self._name()
        if not len(keys):  # there is no table without entries
            keys, values = _no_key(keys), np.array([unknown], values.dtype)
        if keys.dtype == np.float64:
            attributes: dict[str, Any] = {
                "keys_tensor": numpy_helper.from_array(keys),
                "values_tensor": numpy_helper.from_array(values),
                "default_tensor": numpy_helper.from_array(np.array([unknown], np.float64)),
            }
        else:
            kind = "keys_strings" if keys.dtype == object else "keys_int64s"
            attributes = {kind: keys.tolist(), "values_int64s": values.tolist(), "default_int64": int(unknown)}
        self.nodes.append(helper.make_node("LabelEncoder", [name], [made], domain=_TREES, **attributes))
        return made

    def _flags(self, part: Flags) -> str:
        flags = []
        for index, column in enumerate(part.columns):
            name, typed = self._columns[column], self._types[column]
            if typed.type == "string":
                marker = "nan" if is_missing(part.marker) else part.marker
                flag = self._node("Equal", name, self._constant(np.array(marker, object)))
            elif is_missing(part.marker):
                flag = self._node("IsNaN", self._number(column))
                self.refuse(self._any(self._node("IsInf", self._number(column))), "Input X contains infinity")
            else:
                number = self._number(column)
                flag = self._node("Equal", number, self._constant(np.array(float(part.marker or 0))))
                self.refuse(self._any(self._node("IsNaN", number)), "Input X contains NaN")
            if index in part.flagged:
                flags.append(self._node("Cast", flag, to=TensorProto.DOUBLE))
            elif part.refuses_new:
                self.refuse(self._any(flag), f"column {typed.name} has missing values and had none in the fit")
        return self._joined(flags)

    def _joined(self, names: Sequence[str]) -> str:
        if not names:  # a table of no columns has as many rows as the input
            some = self._node("Cast", self._array or next(iter(self._columns.values())), to=TensorProto.STRING)
            none = self._node("Gather", some, self._constant(np.zeros(0, np.int64)), axis=1)
            return self._node("Cast", none, to=TensorProto.DOUBLE)
        return names[0] if len(names) == 1 else self._node("Concat", *names, axis=1)

    def _summed(self) -> str:
        """Return the refusals' zeros as one."""
        while len(self._zeros) > 1:
            self._zeros.append(self._node("Add", self._zeros.pop(), self._zeros.pop()))
        return self._zeros[0]

    def _any(self, flags: str) -> str:
        return self._node("ReduceMax", self._node("Cast", flags, to=TensorProto.INT32), keepdims=0)

    def _constant(self, value: npt.NDArray[Any]) -> str:
        name = self._name()
        self.graph.initializer.append(numpy_helper.from_array(value, name))
        return name

    def _node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = self._name()
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def _name(self) -> str:
        self._count += 1
        return f"{OUTER}{self._count}"


def _labels(labels: Sequence[Any]) -> npt.NDArray[Any]:
    """Return labels as an array that ONNX can hold.

    Raises:
        InvalidInputError: they are neither texts nor numbers nor truth values.
    """
    array = np.asarray(labels)
    if array.dtype.kind == "U" or (array.dtype == object and all(isinstance(label, str) for label in labels)):
        return array.astype(object)
    if array.dtype.kind in "iu":
        return array.astype(np.int64)
    if array.dtype.kind in "fb":
        return array.astype(np.float64 if array.dtype.kind == "f" else np.bool_)
    raise InvalidInputError(
        f"labels of the type {type(labels[0]).__name__} cannot be written to ONNX; make them text or numbers "
        "before the fit, or export with columns=False (--packed)"
    )


def _no_key(keys: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.array([""], object) if keys.dtype == object else np.zeros(1, keys.dtype)
