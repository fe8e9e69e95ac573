"""ONNX files as torch modules, through onnx2torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from mlsys_core.errors import MissingDependencyError
from torch import nn


def load_onnx(path: Path) -> nn.Module:
    """Load the model of a file, in evaluation mode.

    Raises:
        MissingDependencyError: onnx2torch is not installed.
        Exception: the file is damaged, or holds an operator that the converter does not know.
    """
    if importlib.util.find_spec("onnx2torch") is None:
        raise MissingDependencyError(
            f"{path}: cutting ONNX files needs onnx2torch: pip install onnx2torch; a .pt2 file needs nothing"
        )
    onnx = importlib.import_module("onnx")
    model = onnx.load(str(path))
    _inline_copies(model.graph)
    module: nn.Module = _converter().convert(model)
    return module.eval()


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
