"""ONNX files: their inputs, and the names of their outputs."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError, MissingDependencyError
from torch import Tensor

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
        MissingDependencyError: onnx or ONNX Runtime is not installed.
    """
    if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime")):
        raise MissingDependencyError(
            f"{path}: ONNX files need: pip install onnx onnxruntime; a .pt2 file needs nothing"
        )
    onnx = importlib.import_module("onnx")
    try:
        model = onnx.load(str(path))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InvalidInputError(f"{path} is no ONNX file: {reason}") from error
    return OnnxFile(path, model, onnx_inputs(path, model, shape))
