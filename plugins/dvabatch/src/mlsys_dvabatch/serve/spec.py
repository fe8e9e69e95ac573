"""A model's form on the wire: names, datatypes and shapes of its tensors, and the payloads that they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_dvabatch.stages.model import Array, Wire
from mlsys_dvabatch.stages.slicing.sized import SizedModel
from mlsys_dvabatch.stages.slicing.sliced import SlicedModel
from mlsys_dvabatch.stages.zoo import Loaded
from mlsys_serving.models import DataType, ModelSpec, TensorSpec
from torch import Tensor

_TYPES = {
    torch.float32: DataType.FP32,
    torch.float64: DataType.FP64,
    torch.float16: DataType.FP16,
    torch.bfloat16: DataType.FP32,  # NumPy has no bfloat16
    torch.int64: DataType.INT64,
    torch.int32: DataType.INT32,
    torch.int16: DataType.INT16,
    torch.int8: DataType.INT8,
    torch.uint8: DataType.UINT8,
    torch.bool: DataType.BOOL,
}


@dataclass(frozen=True, slots=True)
class WireForm:
    """A model's form on the wire."""

    spec: ModelSpec
    wire: Wire


class ProgramWire:
    """Requests of a program: a row of each input tensor.

    Args:
        model: The program, in stages.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._names: list[str] = model.input_names
        self._example: tuple[Array, ...] = model.example

    def tensors(self) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """Return the inputs and outputs, -1 for dimensions that differ from request to request.

        Raises:
            InvalidInputError: It has tensors of a dtype that the protocol lacks.
        """
        return _tensors(self._model)

    def payloads(self, inputs: Mapping[str, Array], num_rows: int) -> list[Any]:
        """Return each request's rows."""
        columns = [inputs[name] for name in self._names]
        return [tuple(column[row, ...] for column in columns) for row in range(num_rows)]

    def payload(self, made: Any) -> Any:
        """Return a tensor, an array or a tuple of them as arrays of the model's own dtypes."""
        arrays = made if isinstance(made, tuple) else (made,)
        if len(arrays) != len(self._example):
            raise InvalidInputError(f"the model takes {len(self._example)} inputs, got {len(arrays)}")
        return tuple(_array(value, like) for value, like in zip(arrays, self._example, strict=True))


def wire_form(loaded: Loaded, *, max_batch_size: int) -> WireForm:
    """Return a model's form on the wire. It may run a request, so one call should serve all workers.

    Raises:
        InvalidInputError: It has tensors of a dtype that the protocol lacks.
    """
    wire = wire_of(loaded)
    inputs, outputs = wire.tensors()
    spec = ModelSpec(
        name=loaded.name, inputs=inputs, outputs=outputs, platform="mlsys_dvabatch", max_batch_size=max_batch_size
    )
    return WireForm(spec, wire)


def wire_of(loaded: Loaded) -> Wire:
    """Return the form that the model's loader gave, or that of a program."""
    return ProgramWire(loaded.model) if loaded.wire is None else loaded.wire


def _tensors(model: SlicedModel | SizedModel) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return a program's inputs and outputs; see :meth:`ProgramWire.tensors`."""
    example = model.program.example
    shapes: list[tuple[int, ...]]
    if isinstance(model, SizedModel):
        shapes = model.input_shapes()
        answers = [(torch.from_numpy(np.zeros(0, dtype)), shape) for dtype, shape in model.outputs()]
    else:
        shapes = [tuple(value.shape[1:]) for value in example]
        answers = [(value, tuple(value.shape[1:])) for value in _outputs(model)]
    inputs = tuple(
        TensorSpec(name, _type(value), (-1, *shape), finite_only=value.is_floating_point() and not bool(missing.any()))
        for name, value, shape, missing in zip(model.input_names, example, shapes, model.may_be_missing, strict=True)
    )
    names = model.program.output_names or [f"output_{number}" for number in range(len(answers))]
    outputs = tuple(
        TensorSpec(name, _type(value), (-1, *shape)) for name, (value, shape) in zip(names, answers, strict=True)
    )
    return inputs, outputs


def _outputs(model: SlicedModel) -> list[Tensor]:
    """Return the answer to a request: arrays of shape [1, ...]."""
    values = model.example_inputs(1)
    with torch.inference_mode():
        for stage in range(model.num_stages):
            values = model.run(stage, values)
    (result,) = model.results(values)
    return [torch.from_numpy(np.asarray(each)[None]) for each in (result if isinstance(result, tuple) else (result,))]


def _type(value: Tensor) -> DataType:
    try:
        return _TYPES[value.dtype]
    except KeyError:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _TYPES)
        raise InvalidInputError(f"a model with {value.dtype} tensors cannot be served; allowed: {allowed}") from None


def _array(value: Any, like: Array) -> Array:
    found = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    # Numbers of JSON are as they are written: 1 for 1.0.
    if found.dtype != like.dtype and found.dtype.kind in "iufb" and like.dtype.kind in "iuf":
        if found.dtype.kind == "f" and like.dtype.kind != "f":
            raise InvalidInputError(f"got {found.dtype} numbers for an input of {like.dtype}")
        found = found.astype(like.dtype)
    return np.ascontiguousarray(found)
