"""A Hugging Face model directory to its parts: configuration, weights, tokenizer, chat template.

Second stage of loading such a directory; :func:`mlsys_orca.loading.load.load_model` calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from mlsys_core.errors import InvalidInputError

from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.loading.text_part import has_head, open_text_part, text_config
from mlsys_orca.model.config import ModelConfig, UnsupportedModelError
from mlsys_orca.model.decoder import DecoderModel
from mlsys_orca.model.families import ARCHITECTURES, model_family
from mlsys_orca.model.family import Family
from mlsys_orca.model.limits import check_numbers
from mlsys_orca.model.weights.checkpoint import Progress, WeightForm
from mlsys_orca.model.weights.damage import MAX_INDEX_NBYTES, json_object, readable
from mlsys_orca.model.weights.quantized_directory import open_weights
from mlsys_orca.text.chat_template import ChatTemplate
from mlsys_orca.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_ENCODERS = frozenset({"bert", "camembert", "distilbert", "mpnet", "roberta", "xlm-roberta"})  # they write no text
# What a decoder that follows an encoder begins and ends with: generation_config.json overrules config.json.
_BEGINS = ("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")


def load_huggingface(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    weights: WeightForm = "float",
    progress: Progress | None = None,
    read: Callable[..., DecoderModel] = Family.load,
) -> LoadedModel:
    """Load the model in directory ``path``; options as of :func:`mlsys_orca.loading.gguf.load_gguf`.

    Raises:
        InvalidInputError: a file is missing or damaged, or the model needs something that is not implemented.
    """
    raw = read_json(path / "config.json")
    if not isinstance(raw.get("model_type"), str):
        raise InvalidInputError(f"{path / 'config.json'} names no model_type")
    check_numbers(raw)
    generation = read_json(path / "generation_config.json", optional=True)
    begins = {key: generation[key] for key in _BEGINS if generation.get(key) is not None}
    config, load = _route(path, read, raw | begins)
    options = read_json(path / "tokenizer_config.json", optional=True)
    tokenizer = read_tokenizer(path, options, end_ids=generation.get("eos_token_id", raw.get("eos_token_id")))
    template = template_source(path, options)
    return LoadedModel(
        name=path.name,
        config=config,
        model=load(dtype=dtype, device=device, weights=weights, progress=progress),
        tokenizer=tokenizer,
        chat_template=ChatTemplate(template, special_tokens=tokenizer.special_tokens) if template else None,
    )


def _route(
    path: Path, read: Callable[..., DecoderModel], raw: dict[str, Any]
) -> tuple[ModelConfig, Callable[..., DecoderModel]]:
    """Return the configuration and the loader of what runs the model: one of Orca's families or ``transformers``."""
    part, whole = text_config(raw), raw
    raw = part or raw
    architecture = raw["model_type"]
    if architecture in _ENCODERS and not raw.get("is_decoder"):
        raise InvalidInputError(
            f"{path} holds an encoder ({architecture}), which writes no text; for embeddings install mlsys-encoders"
        )
    missing = f"the architecture {architecture!r}"
    if architecture in ARCHITECTURES:
        try:
            family = model_family(architecture)
            config = family.from_huggingface(raw)
        except UnsupportedModelError as error:
            missing = error.what
        else:
            _log.info("%s runs by our own forward for %s", path.name, architecture)
            if part:
                return config, lambda **options: _load_text_part(path, whole, family, config, read, options)
            return config, lambda **options: read(family, config, open_weights(path, raw), **options)
    if read is not Family.load:
        raise InvalidInputError(
            f"{path} runs through transformers, since Orca's own decoders lack {missing}, and cannot be divided: "
            "leave out --tensor-parallel and --pipeline-parallel"
        )
    from mlsys_orca.loading.fallback import open_fallback

    try:
        fallback = open_fallback(path, raw)
    except UnsupportedModelError as error:
        raise InvalidInputError(
            f"{path} can't be served: Orca's own decoders lack {missing}, and through transformers it would need "
            f"{error.what}, which is not implemented"
        ) from error
    _log.info("%s runs through transformers, which is slower: Orca's own decoders lack %s", path.name, missing)
    return fallback.config, fallback.load


def _load_text_part(
    path: Path,
    raw: dict[str, Any],
    family: Family,
    config: ModelConfig,
    read: Callable[..., DecoderModel],
    options: dict[str, Any],
) -> DecoderModel:
    part = open_text_part(open_weights(path, raw), raw)
    return read(family, replace(config, tied_embeddings=not has_head(part)), part, **options)


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Return the object in ``path``; an empty one if it is ``optional`` and there is no such file.

    Raises:
        InvalidInputError: the file is missing, or holds no JSON object.
    """
    if not path.is_file():
        if optional:
            return {}
        raise InvalidInputError(f"{path} is missing; a Hugging Face model directory has one")
    return json_object(path)


def read_tokenizer(path: Path, options: dict[str, Any], *, end_ids: object = None) -> Tokenizer:
    """Return the tokenizer of directory ``path``.

    Args:
        path: Holds a ``tokenizer.json``.
        options: Its ``tokenizer_config.json``.
        end_ids: The ids or the id that end a generation, beside the tokenizer's own, as the file states them.

    Raises:
        InvalidInputError: there is no ``tokenizer.json``, or it is damaged.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        raise InvalidInputError(
            f"{file} is missing; other tokenizer formats are not read. transformers writes one: "
            "AutoTokenizer.from_pretrained(directory).save_pretrained(directory)"
        )
    with readable(file):
        if (nbytes := file.stat().st_size) > MAX_INDEX_NBYTES:
            raise InvalidInputError(f"{file} has {nbytes:,} bytes; a tokenizer has at most {MAX_INDEX_NBYTES:,}")
        backend = tokenizers.Tokenizer.from_file(str(file))
    backend.no_truncation()  # some files cut or pad texts to what their authors trained with
    backend.no_padding()
    backend.encode_special_tokens = options.get("split_special_tokens") is True  # control tokens in a text are text
    special = {
        role: token["content"] if isinstance(token, dict) else token  # written either way, by version
        for role, token in options.items()
        if role in ("bos_token", "eos_token", "unk_token", "pad_token") and token
    }
    ends = set(end_ids) if isinstance(end_ids, list) else {end_ids}
    ends.add(backend.token_to_id(special["eos_token"]) if "eos_token" in special else None)
    return Tokenizer(backend, eos_ids=(end for end in ends if isinstance(end, int)), special_tokens=special)


def template_source(path: Path, options: dict[str, Any]) -> str | None:
    """Return the chat template of directory ``path``, whose ``tokenizer_config.json`` is ``options``."""
    if (path / "chat_template.jinja").is_file():
        with readable(path / "chat_template.jinja"):
            return (path / "chat_template.jinja").read_text(encoding="utf-8")
    source = read_json(path / "chat_template.json", optional=True).get("chat_template") or options.get("chat_template")
    if isinstance(source, list):  # several by name
        named = [entry for entry in source if isinstance(entry, dict)]
        source = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    return source if isinstance(source, str) else None
