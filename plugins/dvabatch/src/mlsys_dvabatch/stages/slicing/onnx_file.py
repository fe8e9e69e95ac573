"""ONNX files: their inputs, and onnx2torch's modules of them, which must answer as the files do."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError, MissingDependencyError
from mlsys_dvabatch.stages.slicing.onnx_child import answers_in_child
from mlsys_dvabatch.stages.slicing.onnx_session import require_rows
from mlsys_serving.isolation import Kind, draw_like
from torch import Tensor, nn

_DTYPES = {  # keys: numbers of onnx.TensorProto
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
}
_STRING = 8


@dataclass(frozen=True, slots=True)
class OnnxInputs:
    """Inputs of a file, and of one request to it."""

    names: tuple[str, ...]
    example: tuple[Tensor, ...]  # inputs of one request, ``[1, ...]`` each
    batch: int | None  # requests that the file takes at once; None: any number


def onnx_inputs(path: Path, model: Any, shape: Sequence[int] | None = None) -> OnnxInputs:
    """Return the inputs of a model.

    Args:
        path: Path of the file, for messages.
        model: An ``onnx.ModelProto``.
        shape: Shape of one request; needed where the file leaves it open, and only where there is one input.

    Raises:
        InvalidInputError: An input is no tensor of numbers, has no first dimension for requests or another one than the
            rest, or its shape is open or another one than ``shape``.
    """
    weights = {weight.name for weight in model.graph.initializer}
    inputs = [each for each in model.graph.input if each.name not in weights]
    if not inputs:
        raise InvalidInputError(f"{path} takes no inputs: there is nothing to batch")
    if shape is not None and len(inputs) > 1:
        raise InvalidInputError(
            f"{path} takes {len(inputs)} inputs, and --shape is the shape of one: leave it out; the file must say the "
            "shapes of all"
        )
    batches, example = [], []
    generator = torch.Generator().manual_seed(0)
    for each in inputs:
        dtype, axes = _dtype(path, each), _axes(path, each, shape)
        batches.append(axes[0])
        example.append(_drawn((1, *_request_shape(path, each.name, axes[1:], shape)), dtype, generator))
    fixed = sorted({size for size in batches if size is not None})
    if len(fixed) > 1:
        found = ", ".join(f"{each.name!r} {size or 'any'}" for each, size in zip(inputs, batches, strict=True))
        raise InvalidInputError(
            f"{path}: the first dimension of all inputs is that of requests, and here they differ: {found}"
        )
    return OnnxInputs(tuple(each.name for each in inputs), tuple(example), fixed[0] if fixed else None)


def _dtype(path: Path, each: Any) -> torch.dtype:
    kind = each.type.WhichOneof("value")
    if kind != "tensor_type":
        raise InvalidInputError(f"{path}: input {each.name!r} is a {kind or 'thing without a type'}, and no tensor")
    number = each.type.tensor_type.elem_type
    if number not in _DTYPES:
        what = "texts" if number == _STRING else f"numbers of ONNX's type {number}"
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES.values())
        raise InvalidInputError(
            f"{path}: input {each.name!r} takes {what}, of which torch has no tensors; allowed: {allowed}. Leave the "
            "steps that read them to the client, or to preprocess= of a Service"
        )
    return _DTYPES[number]


def _axes(path: Path, each: Any, shape: Sequence[int] | None) -> list[int | None]:
    """Return the sizes of an input, None where they are open."""
    tensor = each.type.tensor_type
    if not tensor.HasField("shape"):
        return [None, *(None for _ in _given(path, each.name, "that the file does not say", shape))]
    axes = [dim.dim_value if dim.HasField("dim_value") and dim.dim_value > 0 else None for dim in tensor.shape.dim]
    if not axes:
        raise InvalidInputError(f"{path}: input {each.name!r} is one number, and needs a first dimension for requests")
    return axes


def _request_shape(path: Path, name: str, axes: Sequence[int | None], shape: Sequence[int] | None) -> tuple[int, ...]:
    wanted = f"({', '.join('any' if size is None else str(size) for size in axes)})"
    if shape is None and None not in axes:
        return tuple(size for size in axes if size is not None)
    given = _given(path, name, wanted, shape)
    if len(given) != len(axes) or any(size not in (None, own) for size, own in zip(axes, given, strict=True)):
        raise InvalidInputError(f"{path}: input {name!r} takes requests of shape {wanted}, got {list(given)}")
    return tuple(given)


def _given(path: Path, name: str, wanted: str, shape: Sequence[int] | None) -> Sequence[int]:
    if shape is None:
        raise InvalidInputError(
            f"{path}: input {name!r} takes requests of shape {wanted}: give the shape of one request, like "
            "--shape 3,224,224; of several inputs the file must say it"
        )
    return shape


def _drawn(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return normal numbers, or zeros and ones: integers may be indices."""
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


_TOLERANCE = 1e-3  # relative to the largest number of an output
_ROWS = 4  # requests that are compared, at least
_OTHERS = [kind for kind in Kind if kind.name in ("SMALL", "LARGE", "NEGATIVE", "ZERO") or "INTEGER" in kind.name]

Array = npt.NDArray[Any]


def require_equal(path: Path, model: Any, module: nn.Module, inputs: OnnxInputs) -> None:
    """Refuse a converted model whose answers to a batch are not what the file says of each request.

    Args:
        path: Path of the file.
        model: What it holds, for where ONNX Runtime is not installed or does not know the model.
        module: The converted model; it gets all requests at once.
        inputs: Inputs of the file. The file is asked for each request alone, or as many as it takes.

    Raises:
        InvalidInputError: An answer differs, or an output has no row for each request.
    """
    requests, at_once = _requests(inputs), inputs.batch or 1
    expected = _answers(path, model, inputs, requests)
    alone = [_run(module, requests[first : first + at_once]) for first in range(0, len(requests), at_once)]
    fault = _first_fault(model, [np.concatenate(rows) for rows in zip(*alone, strict=True)], expected)
    if fault := fault or _fault_beyond(path, model, module, inputs):
        raise InvalidInputError(
            f"{path}: onnx2torch converts it into another model: {fault}. Export a .pt2 file instead"
        )
    try:
        fault = _first_fault(model, _run(module, requests), expected)
    except Exception as error:  # noqa: BLE001 - it runs as the file has it: its batch is written into the graph
        fault = str(error).partition("\n")[0]
    if fault:
        raise InvalidInputError(
            f"{path} gives other answers to {len(requests)} requests at once than to {at_once}: {fault}. Export it "
            "with a dynamic first dimension, without operations over it"
        )


def _fault_beyond(path: Path, model: Any, module: nn.Module, inputs: OnnxInputs) -> str | None:
    """Return the first fault in answers to other than ordinary requests, where ONNX Runtime takes them."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    draw, rng = draw_like([value[0].numpy() for value in inputs.example]), np.random.default_rng(1)
    drawn = [[draw(rng, kind) for _ in range(inputs.batch or 1)] for kind in (Kind.ORDINARY, *_OTHERS)][1:]
    tried = [each for each in drawn if each[0] is not None]
    answers = answers_in_child(path, [[np.stack(rows) for rows in zip(*each, strict=True)] for each in tried])
    for requests, expected in zip(tried, answers or (), strict=False):
        try:
            fault = _first_fault(model, _run(module, requests), expected) if expected else None
        except Exception as error:  # noqa: BLE001 - ONNX Runtime answers
            fault = _first_line(error)
        if fault:
            return fault
    return None


def _run(module: nn.Module, requests: Sequence[tuple[Array, ...]]) -> list[Array]:
    with torch.inference_mode():
        found = module(*(torch.from_numpy(np.stack(rows)) for rows in zip(*requests, strict=True)))
    return [value.numpy() for value in (found if isinstance(found, tuple | list) else (found,))]


def _first_fault(model: Any, answers: Sequence[Array], expected: Sequence[Array]) -> str | None:
    if len(answers) != len(expected):
        return f"{len(answers)} outputs for {len(expected)}"
    faults = zip(model.graph.output, map(_fault, answers, expected), strict=True)
    return next((f"{fault} (output {output.name!r})" for output, fault in faults if fault), None)


def _requests(inputs: OnnxInputs) -> list[tuple[Array, ...]]:
    at_once = inputs.batch or 1
    draw, rng = draw_like([value[0].numpy() for value in inputs.example]), np.random.default_rng(0)
    return [draw(rng, Kind.ORDINARY) for _ in range(-(-_ROWS // at_once) * at_once)]


def _answers(path: Path, model: Any, inputs: OnnxInputs, requests: Sequence[tuple[Array, ...]]) -> list[Array]:
    """Return each output's rows."""
    at_once = inputs.batch or 1
    batches = [
        {
            name: np.stack(rows)
            for name, rows in zip(inputs.names, zip(*requests[first : first + at_once], strict=True), strict=True)
        }
        for first in range(0, len(requests), at_once)
    ]
    answers: Sequence[Sequence[Any]] | None = None
    if importlib.util.find_spec("onnxruntime") is not None:
        answers = answers_in_child(path, [list(each.values()) for each in batches])
    if answers is None or not all(answers):
        answers = _of_evaluator(model, batches)
    for given in answers:
        for output, value in zip_longest(model.graph.output, given):
            require_rows(output.name, value, at_once)
    return [np.concatenate(rows) for rows in zip(*answers, strict=True)]


def _of_evaluator(model: Any, batches: Sequence[dict[str, Array]]) -> list[list[Any]]:
    """Return what the evaluator in numpy says that comes with onnx."""
    evaluator = importlib.import_module("onnx.reference").ReferenceEvaluator(model)
    return [list(evaluator.run(None, each)) for each in batches]


def _fault(own: Array, other: Array) -> str | None:
    if own.shape != other.shape or own.dtype != other.dtype:
        return f"{own.dtype} of shape {list(own.shape)} where ONNX has {other.dtype} of shape {list(other.shape)}"
    if own.dtype.kind != "f":
        return None if np.array_equal(own, other) else "other numbers than ONNX's"
    largest = float(np.abs(other[np.isfinite(other)]).max(initial=1e-3))
    if np.allclose(own, other, rtol=0, atol=_TOLERANCE * largest, equal_nan=True):
        return None
    return f"numbers that differ from ONNX's by up to {float(np.nanmax(np.abs(own - other))):.3g}"


_log = logging.getLogger(__name__)
_KNOWN_OPSET = 17  # the latest of which onnx2torch has nearly all operators
_UNKNOWN = re.compile(r"domain='([\w.]*)', operation_type='(\w+)', version=(\d+)")


@dataclass(frozen=True, slots=True)
class OnnxFile:
    """A file that was read."""

    path: Path
    model: Any  # onnx.ModelProto
    inputs: OnnxInputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs."""
        return tuple(each.name for each in self.model.graph.output)


def read_onnx(path: Path, shape: Sequence[int] | None = None) -> OnnxFile:
    """Read a file.

    Args:
        path: Path of the file.
        shape: Shape of one request, where the file leaves it open.

    Raises:
        InvalidInputError: The file is damaged, or has inputs that no request can have.
        MissingDependencyError: onnx is not installed.
    """
    if importlib.util.find_spec("onnx") is None:
        raise MissingDependencyError(
            f"{path}: ONNX files need: pip install onnx onnxruntime; a .pt2 file needs nothing"
        )
    onnx = importlib.import_module("onnx")
    try:
        model = onnx.load(str(path))
    except Exception as error:
        raise InvalidInputError(f"{path} cannot be converted: it is no ONNX file: {_first_line(error)}") from error
    return OnnxFile(path, model, onnx_inputs(path, model, shape))


def as_module(file: OnnxFile) -> nn.Module:
    """Convert a file, and compare the module with what ONNX itself says of some requests.

    Raises:
        InvalidInputError: The file has operators that cannot be converted, or the module gives other answers than ONNX
            Runtime, or onnx's own evaluator if that is not installed.
        MissingDependencyError: onnx2torch is not installed.
    """
    path, inputs = file.path, file.inputs
    if importlib.util.find_spec("onnx2torch") is None:
        raise MissingDependencyError(f"{path}: cutting ONNX files needs onnx2torch: pip install onnx2torch")
    module = _converted(path, file.model)
    require_equal(path, file.model, module, inputs)
    if inputs.batch is not None:
        _log.warning(
            "%s was exported for batches of %d; its rows are checked to be independent, and run in batches of any size",
            path,
            inputs.batch,
        )
    return module


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
