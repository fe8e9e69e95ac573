"""ONNX files as torch modules, through onnx2torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError, MissingDependencyError
from torch import Tensor, nn

_TOLERANCE = 1e-3  # of the largest number of an output


def load_onnx(path: Path, example: Sequence[Tensor]) -> nn.Module:
    """Load the model of a file, in evaluation mode, and compare it with what ONNX itself says of one request.

    Args:
        path: of the file.
        example: inputs of one request, in the order of the file's.

    Raises:
        InvalidInputError: the converted model gives other answers than ONNX Runtime, or onnx's own evaluator if that is
            not installed.
        MissingDependencyError: onnx2torch is not installed.
        Exception: the file is damaged, or holds an operator that the converter does not know.
    """
    if importlib.util.find_spec("onnx2torch") is None:
        raise MissingDependencyError(
            f"{path}: cutting ONNX files needs onnx2torch: pip install onnx2torch; a .pt2 file needs nothing"
        )
    onnx = importlib.import_module("onnx")
    model = onnx.load(str(path))
    expected = _answers(model, example)
    _inline_copies(model.graph)
    module: nn.Module = _converter().convert(model).eval()
    _compare(path, module, example, expected)
    return module


def _answers(model: Any, example: Sequence[Tensor]) -> list[Any]:
    """Return what ONNX Runtime says, or the evaluator in numpy that comes with onnx."""
    weights = {weight.name for weight in model.graph.initializer}
    inputs = [each for each in model.graph.input if each.name not in weights]
    if len(inputs) != len(example):
        raise InvalidInputError(f"the file takes {len(inputs)} inputs; of ONNX files those with {len(example)} are cut")
    for each in [*inputs, *model.graph.output]:  # whatever batch the file was exported for
        if each.type.tensor_type.shape.dim:
            each.type.tensor_type.shape.dim[0].dim_param = "batch"
    del model.graph.value_info[:]
    given = {each.name: value.numpy() for each, value in zip(inputs, example, strict=True)}
    if importlib.util.find_spec("onnxruntime") is not None:
        runtime = importlib.import_module("onnxruntime")
        options = runtime.SessionOptions()
        options.log_severity_level = 4
        try:
            session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
            return list(session.run(None, given))
        except Exception:  # noqa: BLE001 - an operator or a version that it does not know: the other one may
            pass
    return list(importlib.import_module("onnx.reference").ReferenceEvaluator(model).run(None, given))


def _compare(path: Path, module: nn.Module, example: Sequence[Tensor], expected: Sequence[Any]) -> None:
    with torch.inference_mode():
        found = module(*(value.clone() for value in example))
    arrays = [value.numpy() for value in (found if isinstance(found, tuple | list) else (found,))]
    faults = [_fault(own, other) for own, other in zip(arrays, expected, strict=False)]
    if len(arrays) != len(expected):
        faults = [f"{len(arrays)} outputs for {len(expected)}"]
    if fault := next(filter(None, faults), None):
        raise InvalidInputError(
            f"{path}: onnx2torch converts it into another model: {fault}. Export a .pt2 file instead"
        )


def _fault(own: Any, other: Any) -> str | None:
    if own.shape != other.shape or own.dtype != other.dtype:
        return f"{own.dtype} of shape {list(own.shape)} where ONNX has {other.dtype} of shape {list(other.shape)}"
    if own.dtype.kind != "f":
        return None if np.array_equal(own, other) else "other numbers than ONNX's"
    largest = float(np.abs(other[np.isfinite(other)]).max(initial=1e-3))
    if np.allclose(own, other, rtol=0, atol=_TOLERANCE * largest, equal_nan=True):
        return None
    return f"numbers that differ from ONNX's by up to {float(np.nanmax(np.abs(own - other))):.3g}"


def _inline_copies(graph: Any) -> None:
    """Let nodes use weights themselves instead of Identity's copies: exporters write one for weights that are equal."""
    weights = {weight.name for weight in graph.initializer}
    copies: dict[str, str] = {}
    for node in list(graph.node):
        for position, name in enumerate(node.input):
            node.input[position] = copies.get(name, name)
        if node.op_type == "Identity" and node.input[0] in weights and not _is_output(graph, node.output[0]):
            copies[node.output[0]] = node.input[0]
            graph.node.remove(node)


def _is_output(graph: Any, name: str) -> bool:
    return name in {output.name for output in graph.output}


def _converter() -> Any:
    """Import onnx2torch; where torchvision cannot be loaded, without NMS and RoiAlign, its only uses of it.

    The torchvision of the package index is built for CUDA's torch and fails to load with the CPU's.
    """
    try:
        return importlib.import_module("onnx2torch")
    except (ImportError, RuntimeError):
        names = ("torchvision", "torchvision.ops")
        for name in [name for name in sys.modules if name.split(".")[0] in ("torchvision", "onnx2torch")]:
            del sys.modules[name]
        stand_ins = [ModuleType(name) for name in names]
        for name, stand_in in zip(names, stand_ins, strict=True):
            stand_in.__spec__ = ModuleSpec(name, None)
            sys.modules[name] = stand_in
        stand_ins[0].ops = stand_ins[1]  # type: ignore[attr-defined]
        stand_ins[1].roi_align = None  # type: ignore[attr-defined]
        try:
            return importlib.import_module("onnx2torch")
        finally:
            for name in names:
                sys.modules.pop(name, None)
