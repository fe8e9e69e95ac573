"""A model's form on the wire: names, datatypes and shapes of its tensors, and whether it takes texts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_dvabatch.serve.encoder_tensors import encoder_tensors
from mlsys_dvabatch.serve.tokens import TextTokens, tokenizer_of
from mlsys_dvabatch.stages.models.bert import BertStages
from mlsys_dvabatch.stages.slicing.sized import SizedModel
from mlsys_dvabatch.stages.slicing.sliced import SlicedModel
from mlsys_dvabatch.stages.zoo import Loaded
from mlsys_serving.oip import DataType, ModelSpec, TensorSpec
from torch import Tensor

_TYPES = {
    torch.float32: DataType.FP32,
    torch.float64: DataType.FP64,
    torch.float16: DataType.FP16,
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
    texts: TextTokens | None  # None: it takes no text


def wire_form(loaded: Loaded, *, max_batch_size: int) -> WireForm:
    """Return a model's form on the wire. It reads a tokenizer and runs a request, so one call should serve all workers.

    Raises:
        InvalidInputError: It has tensors of a dtype that the protocol lacks.
    """
    model, texts = loaded.model, texts_of(loaded)
    if isinstance(model, BertStages):
        inputs, outputs = encoder_tensors(model, has_texts=texts is not None)
    else:
        inputs, outputs = _tensors(model)
    spec = ModelSpec(
        name=loaded.name, inputs=inputs, outputs=outputs, platform="mlsys_dvabatch", max_batch_size=max_batch_size
    )
    return WireForm(spec, texts)


def texts_of(loaded: Loaded) -> TextTokens | None:
    """Return the tokenizer of an encoder; None: it has none, or the model is no encoder."""
    if not isinstance(loaded.model, BertStages) or (tokenizer := tokenizer_of(loaded)) is None:
        return None
    return TextTokens(tokenizer, loaded.model.config)


def _tensors(model: SlicedModel | SizedModel) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return a program's inputs and outputs, -1 for dimensions that differ from request to request."""
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
    outputs = tuple(
        TensorSpec(f"output_{number}", _type(value), (-1, *shape)) for number, (value, shape) in enumerate(answers)
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
