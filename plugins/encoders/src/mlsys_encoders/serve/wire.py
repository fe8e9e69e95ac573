"""The tensors of an encoder over the Open Inference Protocol: texts or token ids to rows of token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError
from mlsys_encoders.models.config import BertConfig
from mlsys_encoders.serve.tokens import TextTokens
from mlsys_serving.models import DataType, TensorSpec


class EncoderWire:
    """Requests of an encoder; see :class:`mlsys_dvabatch.stages.model.Wire`. A payload is a row of token ids.

    Args:
        config: Shape of the encoder.
        texts: Its tokenizer; None: it takes token ids only.
    """

    def __init__(self, config: BertConfig, texts: TextTokens | None = None) -> None:
        self._config, self.texts = config, texts

    def tensors(self) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """Return the encoder's inputs and outputs."""
        config, has_texts = self._config, self.texts is not None
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

    def payloads(self, inputs: Mapping[str, npt.NDArray[Any]], num_rows: int) -> list[Any]:
        """Return each request's token ids, with their types where those are given, without padding."""
        if "text" not in inputs:
            if "text_pair" in inputs:
                raise InvalidInputError("got text_pair without text: give both")
            return _token_rows(inputs)
        if "input_ids" in inputs:
            raise InvalidInputError("got text and input_ids: give one of them")
        assert self.texts is not None
        texts = [value.decode() for value in inputs["text"][:, 0]]
        if "text_pair" in inputs:
            others = [value.decode() for value in inputs["text_pair"][:, 0]]
            return list(self.texts.encode_pairs(list(zip(texts, others, strict=True)), is_cut=True))
        return list(self.texts.encode(texts, is_cut=True))

    def payload(self, made: Any) -> npt.NDArray[np.int64]:
        """Return the token ids of a text, or of numbers that are token ids already."""
        if not isinstance(made, str):
            return np.asarray(made, np.int64)
        if self.texts is None:
            raise InvalidInputError("this encoder has no tokenizer.json: give token ids")
        return self.texts.encode([made], is_cut=True)[0]


def _token_rows(inputs: Mapping[str, npt.NDArray[Any]]) -> list[Any]:
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
