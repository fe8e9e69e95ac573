"""BERT-like encoders of local Hugging Face folders: the shape, the weights, and what the folder wants of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_dvabatch.stages.models.bert import BertConfig, BertStages
from mlsys_dvabatch.stages.models.sentence import read_sentence_form
from torch import Tensor

_LARGEST = 1 << 24  # of a size in a config.json
_MOST_LAYERS = 512


def load_bert(folder: Path, *, num_stages: int = 2, is_packed: bool = False) -> BertStages:
    """Load an encoder with the weights of a local Hugging Face folder of type "bert".

    Raises:
        InvalidInputError: there is no such model in the folder.
    """
    from safetensors.torch import load_file

    try:
        raw = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{folder} holds no BERT-like encoder in safetensors: {error}") from error
    except Exception as error:
        raise InvalidInputError(f"{folder / 'model.safetensors'} is damaged: {error}") from error
    config = _config(folder, raw)
    with torch.device("meta"):
        model = BertStages(config, num_stages, is_packed=is_packed)
    try:
        model.load_state_dict(_own_names(weights, config), assign=True)
        if unknown := sorted(name for name in weights if not name.removeprefix("bert.").startswith(_KNOWN)):
            raise KeyError(f"no layer takes {unknown[0]}")
    except (KeyError, RuntimeError) as error:
        raise InvalidInputError(f"{folder}: the weights are not those of its config.json: {error}") from error
    return model.eval()


# Weights of an encoder; its pooler and the heads of its training are not needed for sentence vectors.
_KNOWN = ("embeddings.", "encoder.layer.", "pooler.", "cls.")
_ASSUMED = {
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}
_SIZES = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_length": "max_position_embeddings",
}


def _config(folder: Path, raw: object) -> BertConfig:
    """Return the shape that ``config.json`` gives.

    Raises:
        InvalidInputError: It is of another model, or asks for what is not computed here.
    """
    if not isinstance(raw, dict) or raw.get("model_type") != "bert":
        got = raw.get("model_type") if isinstance(raw, dict) else raw
        raise InvalidInputError(f"{folder}: got {got!r}; a BERT-like encoder (model_type bert) is needed")
    for key, value in _ASSUMED.items():
        if raw.get(key, value) != value:
            raise InvalidInputError(f"{folder}: got {key} {raw[key]!r}; only {value!r} is computed here")
    sizes: dict[str, Any] = {own: raw.get(theirs) for own, theirs in _SIZES.items()}
    epsilon = raw.get("layer_norm_eps", 1e-12)
    for own, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
            raise InvalidInputError(
                f"{folder}: {_SIZES[own]} is {value!r}: a whole number from 1 to {_LARGEST:,} is needed"
            )
    if sizes["num_layers"] > _MOST_LAYERS or sizes["hidden_size"] % sizes["num_heads"]:
        raise InvalidInputError(
            f"{folder}: {sizes['num_layers']} layers, {sizes['num_heads']} heads, {sizes['hidden_size']} features: "
            f"needed are at most {_MOST_LAYERS} layers, and a number of features that the heads divide"
        )
    if not isinstance(epsilon, float) or not 0 < epsilon < 1:
        raise InvalidInputError(f"{folder}: layer_norm_eps is {epsilon!r}: a number between 0 and 1 is needed")
    return BertConfig(**sizes, layer_norm_eps=epsilon, form=read_sentence_form(folder, raw))


def _own_names(weights: dict[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    prefix = "bert." if any(name.startswith("bert.") for name in weights) else ""
    own = {
        "words.weight": weights[f"{prefix}embeddings.word_embeddings.weight"],
        "positions.weight": weights[f"{prefix}embeddings.position_embeddings.weight"],
        "token_type": weights[f"{prefix}embeddings.token_type_embeddings.weight"][0],
    }
    pairs = [(f"{prefix}embeddings.LayerNorm", "norm")]
    for number in range(config.num_layers):
        theirs, ours = f"{prefix}encoder.layer.{number}", f"layers.{number}"
        for kind in ("weight", "bias"):
            parts = [weights[f"{theirs}.attention.self.{name}.{kind}"] for name in ("query", "key", "value")]
            own[f"{ours}.query_key_value.{kind}"] = torch.cat(parts)
        pairs += [
            (f"{theirs}.attention.output.dense", f"{ours}.attention_output"),
            (f"{theirs}.attention.output.LayerNorm", f"{ours}.attention_norm"),
            (f"{theirs}.intermediate.dense", f"{ours}.up"),
            (f"{theirs}.output.dense", f"{ours}.down"),
            (f"{theirs}.output.LayerNorm", f"{ours}.output_norm"),
        ]
    for theirs, ours in pairs:
        for kind in ("weight", "bias"):
            own[f"{ours}.{kind}"] = weights[f"{theirs}.{kind}"]
    return own
