"""ONNX files as torch modules, through onnx2torch."""

from __future__ import annotations

import importlib
import importlib.util
import keyword
import logging
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from mlsys_core.errors import InvalidInputError, MissingDependencyError
from mlsys_dvabatch.stages.slicing.onnx_answers import require_equal
from mlsys_dvabatch.stages.slicing.onnx_inputs import onnx_inputs
from torch import Tensor, nn

_log = logging.getLogger(__name__)
_KNOWN_OPSET = 17  # the latest of which onnx2torch has nearly all operators
_UNKNOWN = re.compile(r"domain='([\w.]*)', operation_type='(\w+)', version=(\d+)")


def load_onnx(path: Path, shape: Sequence[int] | None = None) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Load the model of a file, in evaluation mode, and compare it with what ONNX itself says of a few requests.

    Args:
        path: Path of the file.
        shape: Shape of one request, where the file leaves it open.

    Returns:
        The module, and the inputs of one request, ``[1, ...]`` each.

    Raises:
        InvalidInputError: The file is damaged, has inputs or operators that cannot be converted, or the converted model
            gives other answers than ONNX Runtime, or onnx's own evaluator if that is not installed.
        MissingDependencyError: onnx2torch is not installed.
    """
    if importlib.util.find_spec("onnx2torch") is None:
        raise MissingDependencyError(
            f"{path}: cutting ONNX files needs onnx2torch: pip install onnx2torch; a .pt2 file needs nothing"
        )
    onnx = importlib.import_module("onnx")
    try:
        model = onnx.load(str(path))
    except Exception as error:
        raise InvalidInputError(f"{path} cannot be converted: it is no ONNX file: {_first_line(error)}") from error
    inputs = onnx_inputs(path, model, shape)
    module = _converted(path, model)
    _name_inputs(module, inputs.names)
    require_equal(path, model, module, inputs)
    if inputs.batch is not None:
        _log.warning(
            "%s was exported for batches of %d; its rows are checked to be independent, and run in batches of any size",
            path,
            inputs.batch,
        )
    return module, inputs.example


def _converted(path: Path, model: Any) -> nn.Module:
    """Convert a model, as its file has it or written for an older set of operators."""
    versions = [each.version for each in model.opset_import if each.domain in ("", "ai.onnx")]
    try:
        return _module(model)
    except NotImplementedError as error:
        unknown = error
    if max(versions, default=0) > _KNOWN_OPSET:
        try:
            return _module(importlib.import_module("onnx.version_converter").convert_version(model, _KNOWN_OPSET))
        except NotImplementedError as error:
            unknown = error
        except Exception:  # noqa: BLE001 - it cannot be written so: the first fault is the one to tell
            _log.debug("%s cannot be written for opset %d", path, _KNOWN_OPSET, exc_info=True)
    raise InvalidInputError(f"{path} cannot be converted: {_told(unknown)}") from unknown


def _module(model: Any) -> nn.Module:
    copied = type(model)()
    copied.CopyFrom(model)
    _inline_copies(copied.graph)
    module: nn.Module = _converter().convert(copied).eval()
    return module


def _name_inputs(module: Any, names: Sequence[str]) -> None:
    """Give a module's arguments the names of the file's inputs, as far as Python allows them."""
    taken = {node.name for node in module.graph.nodes}
    for node, name in zip(module.graph.find_nodes(op="placeholder"), names, strict=True):
        identifier = re.sub(r"\W", "_", name)
        if identifier.isidentifier() and not keyword.iskeyword(identifier) and identifier not in taken:
            node.target = node.name = identifier
            taken.add(identifier)
    module.recompile()


def _told(error: NotImplementedError) -> str:
    found = _UNKNOWN.search(str(error))
    if found is None:
        return _first_line(error)
    domain, name, version = found.groups()
    instead = "export a .pt2 file instead"
    if domain == "ai.onnx.ml":
        instead = "pipelines of scikit-learn are served by mlsys windtunnel"
    return (
        f"onnx2torch does not know the operator {domain + '.' if domain else ''}{name} (version {version}); {instead}"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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
