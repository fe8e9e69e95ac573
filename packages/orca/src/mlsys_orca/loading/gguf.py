"""Read a GGUF file into its parts: configuration, weights, tokenizer, chat template.

Second stage of loading a GGUF; :func:`mlsys_orca.loading.load.load_model` calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError

from mlsys_orca.loading.gguf_tokenizer import tokenizer_from_gguf
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.model.config_readers import GgufFields
from mlsys_orca.model.decoder import DecoderModel
from mlsys_orca.model.families import model_family
from mlsys_orca.model.family import Family
from mlsys_orca.model.limits import check_numbers
from mlsys_orca.model.weights.checkpoint import Checkpoint, Progress, WeightForm
from mlsys_orca.model.weights.gguf_blocks import check_types
from mlsys_orca.model.weights.gguf_file import GgufFile
from mlsys_orca.text.chat_template import ChatTemplate
from mlsys_orca.text.tokenizer import Tokenizer

_ROPE_DIVISORS = {  # how GGUF stores rotary scalings: tensor -> field of GgufFields
    "rope_freqs.weight": "rope_divisors",
    "rope_factors_long.weight": "long_divisors",
    "rope_factors_short.weight": "short_divisors",
}


def load_gguf(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    weights: WeightForm = "float",
    progress: Progress | None = None,
    noted: Callable[[Checkpoint], Checkpoint] | None = None,
    file: GgufFile | None = None,
    read: Callable[..., DecoderModel] = Family.load,
) -> LoadedModel:
    """Load the model in GGUF file ``path``.

    Args:
        path: The file.
        dtype: Of computing and of what is kept floating.
        device: Where the weights go.
        weights: The form of matrices.
        progress: Called with the bytes of weights read so far and those in all.
        noted: Wraps the file whose weights are read.
        file: ``path``, open; None: it is opened.
        read: Reads the weights, called as :meth:`Family.load`.

    Raises:
        InvalidInputError: the file is damaged, or the model needs something that is not implemented.
    """
    file = file or GgufFile(path)
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise InvalidInputError(f"{path} is one part of several; join them first: llama-gguf-split --merge FIRST OUT")
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise InvalidInputError(f"{path} names no general.architecture; is it a language model?")
    family = model_family(architecture)
    if family.from_gguf is None:
        raise InvalidInputError(
            f"{path} is a GGUF of architecture {architecture!r}, which is read from Hugging Face directories only"
        )
    check_numbers(file.metadata, prefix=f"{architecture}.")
    check_types(entry.type for entry in file.tensors.values())
    divisors: dict[str, Any] = {}
    for name in _ROPE_DIVISORS.keys() & file.names:
        values = torch.empty(file.shape(name))
        file.read_into(name, values)
        divisors[_ROPE_DIVISORS[name]] = tuple(values.tolist())
    config = family.from_gguf(
        GgufFields(metadata=file.metadata, architecture=architecture, tensor_names=file.names, **divisors)
    )
    tokenizer = tokenizer_from_gguf(file.metadata)
    template = file.metadata.get("tokenizer.chat_template")
    return LoadedModel(
        name=path.stem,
        config=config,
        model=read(
            family,
            config,
            noted(file) if noted else file,
            dtype=dtype,
            device=device,
            weights=weights,
            progress=progress,
        ),
        tokenizer=tokenizer,
        chat_template=None if template is None else _chat_template(template, tokenizer),
    )


def _chat_template(source: object, tokenizer: Tokenizer) -> ChatTemplate | None:
    if not isinstance(source, str):
        raise InvalidInputError(f"tokenizer.chat_template is of type {type(source).__name__}; it is a text")
    return ChatTemplate(source, special_tokens=tokenizer.special_tokens) if source else None
