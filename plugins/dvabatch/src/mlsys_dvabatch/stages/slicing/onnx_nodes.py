"""Run an ONNX file node by node, each as an operator of its own, so that requests are followed through it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mlsys_serving.isolation.reading import as_operator
from torch import Tensor


def run_by_nodes(path: Path, inputs: Sequence[str], outputs: Sequence[str], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a file's outputs; see :func:`~mlsys_serving.isolation.reading.as_operator`.

    Args:
        path: Path of the file.
        inputs: Names of its inputs.
        outputs: Names of its outputs.
        tensors: The inputs' values.
    """
    onnx = importlib.import_module("onnx")
    model = importlib.import_module("onnx.inliner").inline_local_functions(onnx.load(str(path)))
    known: dict[str, Any] = dict(zip(inputs, tensors, strict=True))  # name -> tensor, or array where it is constant
    known |= {weight.name: onnx.numpy_helper.to_array(weight) for weight in model.graph.initializer}
    for node in model.graph.node:
        names = [*dict.fromkeys(name for name in _read(node) if name in known)]
        run = _alone(model, node, {name: known[name] for name in names})
        given = [known[name] for name in names if isinstance(known[name], Tensor)]
        made = as_operator(node.op_type, run, *given) if given else [one.numpy() for one in run()]
        known |= zip(filter(None, node.output), made, strict=True)
    return [value if isinstance(value, Tensor) else torch.from_numpy(value) for value in map(known.get, outputs)]


def _read(node: Any) -> Iterator[str]:
    """Yield the names that a node and the graphs within it read; some may be of such a graph itself."""
    yield from node.input
    for attribute in node.attribute:
        for graph in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
            yield from (each.name for each in graph.output)
            for inner in graph.node:
                yield from _read(inner)


def _alone(model: Any, node: Any, values: dict[str, Any]) -> Callable[..., list[Tensor]]:
    """Return a node as a function of those of its values that are tensors; the others are constant within it."""
    onnx, runtime = importlib.import_module("onnx"), importlib.import_module("onnxruntime")
    names = [name for name, value in values.items() if isinstance(value, Tensor)]
    made = [name for name in node.output if name]

    def declared(name: str) -> Any:
        dtype = onnx.helper.np_dtype_to_tensor_dtype(values[name].numpy().dtype)
        return onnx.helper.make_tensor_value_info(name, dtype, None)

    graph = onnx.helper.make_graph(
        [node],
        "one node",
        [declared(name) for name in names],
        [onnx.helper.make_empty_tensor_value_info(name) for name in made],
        [onnx.numpy_helper.from_array(value, name) for name, value in values.items() if name not in names],
    )
    whole = onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    options = runtime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = runtime.InferenceSession(whole.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def run(*tensors: Tensor) -> list[Tensor]:
        given = (np.ascontiguousarray(tensor.numpy()) for tensor in tensors)
        return [torch.from_numpy(value) for value in session.run(made, dict(zip(names, given, strict=True)))]

    return run
