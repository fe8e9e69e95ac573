"""ONNX graphs of a few steps, some of which mix requests behind a bound; see :mod:`.programs`, whose twin this is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from hypothesis import strategies as st
from mlsys_dvabatch.stages.slicing.onnx_session import OnnxSession
from mlsys_serving.isolation.reading import mixing_operator
from onnx import TensorProto, helper, numpy_helper

WIDTH = 6


@dataclass
class Writer:
    """Nodes of a graph over ``x``, [requests, WIDTH]."""

    nodes: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)

    def __call__(self, kind: str, *inputs: str, num: int = 1, **attributes: Any) -> Any:
        """Add a node; return the names of its outputs."""
        made = [f"v{len(self.nodes)}_{number}" for number in range(num)]
        self.nodes.append(helper.make_node(kind, inputs, made, **attributes))
        return made[0] if num == 1 else made

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        """Add a weight."""
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def saved(self, result: str, path: Path, batch: int | None) -> Path:
        """Write the graph that gives ``result``, for any batch size or one."""
        shape = ["n" if batch is None else batch, WIDTH]
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
        nodes = [*self.nodes, helper.make_node("Identity", [result], ["y"])]
        outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)]
        graph = helper.make_graph(nodes, "drawn", inputs, outputs, self.weights)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
        return path


def _weights(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape)


def _looped(g: Writer, x: str) -> str:
    """Add one three times, within a loop."""
    kinds = {"i": TensorProto.INT64, "go": TensorProto.BOOL, "s": TensorProto.FLOAT}
    inputs = [helper.make_tensor_value_info(name, kind, [] if name != "s" else None) for name, kind in kinds.items()]
    one = g.constant(1)
    nodes = [helper.make_node("Add", ["s", one], ["t"]), helper.make_node("Identity", ["go"], ["on"])]
    outputs = [
        onnx.ValueInfoProto(name=name, type=value.type) for name, value in zip(("on", "t"), inputs[1:], strict=True)
    ]
    body = helper.make_graph(nodes, "body", inputs, outputs)
    return g("Loop", g.constant(3, np.int64), "", x, body=body)


def _put_back(g: Writer, x: str) -> str:
    """Sort the requests, work on them, put them back."""
    first = g("Gather", x, g.constant(0, np.int64), axis=1)
    _, order = g("TopK", first, g("Slice", g("Shape", x), *(g.constant([n], np.int64) for n in (0, 1))), num=2, axis=0)
    rows = g("Mul", g("Gather", x, order, axis=0), g.constant(2))
    return g("ScatterND", x, g("Unsqueeze", order, g.constant([1], np.int64)), rows)


def _attention(g: Writer, x: str) -> str:
    x = g("Reshape", x, g.constant([0, 3, 2], np.int64))
    scores = g("Softmax", g("MatMul", x, g("Transpose", x, perm=[0, 2, 1])), axis=-1)
    return g("Reshape", g("MatMul", scores, x), g.constant([0, WIDTH], np.int64))


def _convolved(g: Writer, x: str) -> str:
    wide = g("Unsqueeze", x, g.constant([1], np.int64))
    made = g("Conv", wide, g.constant(_weights(2, 1, 1, 3)), pads=[1, 1])
    return g("Squeeze", made, g.constant([1], np.int64))


def _table(g: Writer, x: str) -> str:
    ids = g("Cast", g("Clip", g("Abs", x), g.constant(0), g.constant(5)), to=TensorProto.INT64)
    return g("Add", x, g("ReduceMax", g("Gather", g.constant(_weights(3, 6, 4)), ids), axes=[2], keepdims=0))


def _recurrent(g: Writer, x: str) -> str:
    steps = g("Transpose", g("Reshape", x, g.constant([0, 3, 2], np.int64)), perm=[1, 0, 2])
    weights = [g.constant(_weights(seed, 1, 4 * WIDTH, size)) for seed, size in ((4, 2), (5, WIDTH))]
    _, last, _ = g("LSTM", steps, *weights, num=3, hidden_size=WIDTH)
    return g("Squeeze", last, g.constant([0], np.int64))


def _bounded(g: Writer, x: str) -> str:
    largest = g("ReduceMax", g("Abs", x), axes=[1], keepdims=1)
    return g("Div", x, g("Max", largest, g.constant(3)))


APART: dict[str, Callable[[Writer, str], str]] = {
    "product": lambda g, x: g("MatMul", x, g.constant(_weights(1, WIDTH, WIDTH))),
    "with a bias": lambda g, x: g(
        "Gemm", x, *(g.constant(_weights(6, *shape)) for shape in ((WIDTH, WIDTH), (WIDTH,)))
    ),
    "norm": lambda g, x: g("LayerNormalization", x, g.constant(np.ones(WIDTH)), axis=1),
    "softmax": lambda g, x: g("Softmax", x, axis=1),
    "time first": lambda g, x: g("Transpose", g("Mul", g("Transpose", x, perm=[1, 0]), g.constant(2)), perm=[1, 0]),
    "flat": lambda g, x: g("Reshape", g("Neg", g("Reshape", x, g.constant([-1], np.int64))), g("Shape", x)),
    "sorted within": lambda g, x: g("TopK", x, g.constant([WIDTH], np.int64), num=2, axis=1)[0],
    "halves": lambda g, x: g("Concat", *g("Split", x, num=2, axis=1)[::-1], axis=1),
    "bounded within": _bounded,
    "convolved": _convolved,
    "attention": _attention,
    "table": _table,
    "recurrent": _recurrent,
    "looped": _looped,
    "put back": _put_back,
}
REDUCED: dict[str, Callable[[Writer, str], str]] = {
    "max": lambda g, x: g("ReduceMax", x, keepdims=0),
    "sum over requests": lambda g, x: g("ReduceSum", x, g.constant([0], np.int64), keepdims=0),
    "mean of squares": lambda g, x: g("ReduceMean", g("Mul", x, x), keepdims=0),
    "least": lambda g, x: g("Neg", g("ReduceMin", x, axes=[0])),
    "norm": lambda g, x: g("ReduceL2", x, keepdims=0),
    "scan": lambda g, x: g("Gather", g("CumSum", x, g.constant(0, np.int64)), g.constant(-1, np.int64)),
    "integers": lambda g, x: g(
        "Cast", g("ReduceMax", g("Cast", x, to=TensorProto.INT64), keepdims=0), to=TensorProto.FLOAT
    ),
    "place of the greatest": lambda g, x: g("Cast", g("ArgMax", x, axis=0), to=TensorProto.FLOAT),
    "product": lambda g, x: g("MatMul", g("Transpose", x, perm=[1, 0]), x),
    "the first": lambda g, x: g("Gather", x, g.constant(0, np.int64)),
    "the one before": lambda g, x: g("Concat", *g("Split", x, num=2)[::-1], axis=0),  # of two requests
}
GATES: dict[str, Callable[[Writer, str, str, str], str]] = {  # numbers, what was reduced, a bound
    "clip": lambda g, x, by, bound: g("Div", x, g("Clip", g("ReduceMax", by, keepdims=0), bound)),
    "where": lambda g, x, by, bound: g("Where", g("Greater", g("ReduceMax", by, keepdims=0), bound), g("Neg", x), x),
    "relu": lambda g, x, by, bound: g("Add", x, g("Relu", g("Sub", g("ReduceMax", by, keepdims=0), bound))),
    "round": lambda g, x, by, bound: g("Add", x, g("Floor", g("Div", g("ReduceMax", by, keepdims=0), bound))),
    "plain": lambda g, x, by, bound: g("Add", x, g("ReduceSum", by, keepdims=0)),
}


@dataclass(frozen=True)
class OnnxProgram:
    """Steps, and where one that mixes stands among them; None: nowhere."""

    before: tuple[str, ...]
    mixing: tuple[str, str, float] | None  # what is reduced, the gate, its bound
    after: tuple[str, ...]
    batch: int | None  # requests that the file takes at once; None: any number

    def saved(self, path: Path) -> Path:
        """Write it to a file."""
        g, x = Writer(), "x"
        for name in self.before:
            x = APART[name](g, x)
        if self.mixing is not None:
            reduced, gate, bound = self.mixing
            x = GATES[gate](g, x, REDUCED[reduced](g, x), g.constant(bound))
        for name in self.after:
            x = APART[name](g, x)
        return g.saved(x, path, self.batch)


def onnx_programs() -> st.SearchStrategy[OnnxProgram]:
    """Draw programs; half of them mix."""
    steps = st.lists(st.sampled_from(sorted(APART)), max_size=3).map(tuple)
    bounds = st.floats(0, 9).map(lambda power: 10.0**power)
    mixing = st.tuples(st.sampled_from(sorted(REDUCED)), st.sampled_from(sorted(GATES)), bounds)
    return st.builds(OnnxProgram, steps, st.none() | mixing, steps, st.sampled_from([None, None, 2, 4]))


def onnx_fault(program: OnnxProgram, path: Path) -> str | None:
    """Return what is wrong with the verdict on a program; None: nothing."""
    session = OnnxSession(program.saved(path), ["x"], ["y"], program.batch)
    named = mixing_operator(session, [torch.zeros(1, WIDTH)])
    if (named is None) == (program.mixing is None):
        return None
    return f"{named or 'no operator'} is named in {program}"
