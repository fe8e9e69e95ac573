"""The tensors of an encoder over the Open Inference Protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from mlsys_core.errors import InvalidInputError
from mlsys_dvabatch.stages.models.bert import BertStages
from mlsys_serving.oip import DataType, TensorSpec


def encoder_tensors(model: BertStages, *, has_texts: bool) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return an encoder's inputs and outputs."""
    config = model.config
    inputs = [
        TensorSpec("input_ids", DataType.INT64, (-1, -1), optional=has_texts),
        TensorSpec("attention_mask", DataType.INT64, (-1, -1), optional=True),
    ]
    if config.num_token_types > 1:
        inputs.append(TensorSpec("token_type_ids", DataType.INT64, (-1, -1), optional=True))
    if has_texts:
        inputs.append(TensorSpec("text", DataType.BYTES, (-1, 1), optional=True, utf8_only=True))
    if has_texts and config.head is not None:
        inputs.append(TensorSpec("text_pair", DataType.BYTES, (-1, 1), optional=True, utf8_only=True))
    labels = () if config.head is None else config.head.labels
    name = "embedding" if config.head is None else "logits"
    return tuple(inputs), (TensorSpec(name, DataType.FP32, (-1, config.embedding_size), labels=labels),)


def token_rows(inputs: Mapping[str, np.ndarray[Any, Any]]) -> list[Any]:
    """Return each request's token ids, with their types where those are given, without padding."""
    if "input_ids" not in inputs:
        raise InvalidInputError("got neither text nor input_ids: give one of them")
    tokens, mask, types = (inputs.get(name) for name in ("input_ids", "attention_mask", "token_type_ids"))
    assert tokens is not None
    for name, other in (("attention_mask", mask), ("token_type_ids", types)):
        if other is not None and other.shape != tokens.shape:
            raise InvalidInputError(f"{name} is {list(other.shape)}, input_ids {list(tokens.shape)}: make them alike")
    rows = tokens if types is None else np.stack([tokens, types], axis=1)
    if mask is None:
        return list(rows)
    kept = mask != 0
    if (kept[:, 1:] & ~kept[:, :-1]).any():
        raise InvalidInputError("attention_mask has a 0 before a 1: pad on the right")
    return [row[..., keep] for row, keep in zip(rows, kept, strict=True)]
