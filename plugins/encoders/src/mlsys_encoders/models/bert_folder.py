"""Encoders of local Hugging Face folders: the shape, the weights, and what the folder wants of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor

from mlsys_encoders.models.bert import BertStages
from mlsys_encoders.models.config import BertConfig, HeadConfig
from mlsys_encoders.models.families import FAMILIES, NOMIC_OWN_SIZES, Family
from mlsys_encoders.models.layers import ACTIVATIONS
from mlsys_encoders.models.sentence import read_sentence_form

_LARGEST = 1 << 24  # largest size in a config.json
_MOST_LAYERS = 512
_MOST_LABELS = 1 << 16
_PLAIN = ("Model", "ForMaskedLM", "ForPreTraining")  # architectures whose encoder alone gives sentence vectors
_CLASSIFIER = "ForSequenceClassification"
PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")


def load_bert(folder: Path, *, num_stages: int = 2, is_packed: bool = False) -> BertStages:
    """Load an encoder with the weights of a local Hugging Face folder, of a family of :data:`.families.FAMILIES`.

    Raises:
        InvalidInputError: there is no such model in the folder.
    """
    try:
        raw = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{folder} holds no BERT-like encoder in safetensors: {error}") from error
    weights = _weights(folder / "model.safetensors", f"{folder} holds no BERT-like encoder in safetensors")
    family = _family(folder, raw)
    try:
        config = _config(folder, raw, family)
    except InvalidInputError as error:
        raise error if str(folder) in str(error) else InvalidInputError(f"{folder}: {error}") from error
    with torch.device("meta"):
        model = BertStages(config, num_stages, is_packed=is_packed)
    own = _Names(weights, family, config)
    try:
        model.load_state_dict(own.read() | _dense_weights(folder, config), assign=True)
        if unknown := own.unknown():
            raise KeyError(f"no layer takes {unknown[0]}")
    except (KeyError, RuntimeError) as error:
        raise InvalidInputError(f"{folder}: the weights are not those of its config.json: {error}") from error
    return model.eval()


def _weights(path: Path, otherwise: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        found = load_file(path)
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{otherwise}: {error}") from error
    except Exception as error:
        raise InvalidInputError(f"{path} is damaged: {error}") from error
    return {name: value.float() if value.is_floating_point() else value for name, value in found.items()}


def _family(folder: Path, raw: object) -> Family:
    kind = raw.get("model_type") if isinstance(raw, dict) else raw
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise InvalidInputError(f"{folder}: got {kind!r}; a BERT-like encoder (model_type {known}) is needed")
    return FAMILIES[kind]


def _config(folder: Path, raw: Mapping[str, Any], family: Family) -> BertConfig:
    """Return the shape that ``config.json`` gives.

    Raises:
        InvalidInputError: It asks for what is not computed here.
    """
    keys = NOMIC_OWN_SIZES if "n_embd" in raw and raw.get("model_type") == "nomic_bert" else family.sizes
    sizes: dict[str, Any] = {own: raw.get(theirs) for own, theirs in keys.items()}
    for own, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
            raise InvalidInputError(f"{keys[own]} is {value!r}: a whole number from 1 to {_LARGEST:,} is needed")
    if sizes["num_layers"] > _MOST_LAYERS or sizes["hidden_size"] % sizes["num_heads"]:
        raise InvalidInputError(
            f"{sizes['num_layers']} layers, {sizes['num_heads']} heads, {sizes['hidden_size']} features: "
            f"needed are at most {_MOST_LAYERS} layers, and a number of features that the heads divide"
        )
    config = BertConfig(**sizes, **family.shape(raw))
    if config.thetas and config.hidden_size // config.num_heads % 2:
        raise InvalidInputError("rotary positions need an even number of features in a head")
    types: object = config.num_token_types
    if not isinstance(types, int) or isinstance(types, bool) or not 0 <= types <= 1 << 16:
        raise InvalidInputError(f"type_vocab_size is {types!r}: a whole number up to {1 << 16:,} is needed")
    epsilon = config.layer_norm_eps
    if not isinstance(epsilon, float) or not 0 < epsilon < 1:
        raise InvalidInputError(f"layer_norm_eps is {epsilon!r}: a number between 0 and 1 is needed")
    if config.max_length <= config.position_offset:
        raise InvalidInputError(f"{config.max_length} positions leave none behind the padding token's")
    head = _head(raw, family)
    return replace(
        config,
        max_length=config.max_length - config.position_offset,
        head=head,
        form=read_sentence_form(folder, config.hidden_size, has_head=head is not None),
    )


def _head(raw: Mapping[str, Any], family: Family) -> HeadConfig | None:
    """Return the classifier that ``architectures`` names; None: a plain encoder."""
    named = raw.get("architectures") or []
    names = [str(name) for name in (named if isinstance(named, list) else [named])]
    for name in names:
        if not name.endswith((*_PLAIN, _CLASSIFIER)):
            raise InvalidInputError(
                f"got architecture {name!r}, whose head is more than the encoder; served here are sentence "
                "vectors of plain encoders and classifiers of texts: export this model with torch.export and serve "
                "the .pt2"
            )
    if not any(name.endswith(_CLASSIFIER) for name in names):
        return None
    num = raw.get("num_labels") or 2
    if not isinstance(num, int) or not 1 <= num <= _MOST_LABELS:
        raise InvalidInputError(f"num_labels is {num!r}: a whole number from 1 to {_MOST_LABELS:,} is needed")
    labels = raw.get("id2label") or {str(number): f"LABEL_{number}" for number in range(num)}
    if not isinstance(labels, dict) or not 1 <= len(labels) <= _MOST_LABELS:
        raise InvalidInputError(f"id2label has no names of 1 to {_MOST_LABELS:,} labels")
    try:
        ordered = tuple(str(labels[str(number)]) for number in range(len(labels)))
    except KeyError as error:
        raise InvalidInputError(f"id2label has no label {error}: labels are numbered from 0") from error
    if (problem := raw.get("problem_type")) not in (None, *PROBLEMS):
        raise InvalidInputError(f"problem_type is {problem!r}; known are {', '.join(PROBLEMS)}")
    if "norm" not in family.head:
        return HeadConfig(labels=ordered, activation=family.head_activation, problem=problem)
    activation, pooling = raw.get("classifier_activation", "gelu"), raw.get("classifier_pooling", "cls")
    if not isinstance(activation, str) or activation not in ACTIVATIONS or pooling not in ("cls", "mean"):
        raise InvalidInputError(f"got classifier_activation {activation!r} and classifier_pooling {pooling!r}")
    return HeadConfig(
        labels=ordered,
        activation=activation,
        pooling=pooling,
        has_pool_bias=bool(raw.get("classifier_bias", False)),
        has_norm=True,
        problem=problem,
    )


def _dense_weights(folder: Path, config: BertConfig) -> dict[str, Tensor]:
    """Return the weights of the folder's Dense modules under our names."""
    found = {}
    for number, dense in enumerate(config.form.denses):
        where = folder / dense.path / "model.safetensors"
        for name, value in _weights(where, f"{where.parent} holds no Dense module in safetensors").items():
            if not name.startswith("linear."):
                raise KeyError(f"no Dense takes {name}")
            found[f"denses.{number}.{name.removeprefix('linear.')}"] = value
    return found


class _Names:
    """Weights of a file under our names, and which of them nobody took."""

    def __init__(self, weights: Mapping[str, Tensor], family: Family, config: BertConfig) -> None:
        self._weights, self._family, self._config = weights, family, config
        self._taken: set[str] = set()
        words = family.names["words"][0]
        self._prefix = next((p for p in family.prefixes if f"{p}{words}.weight" in weights), family.prefixes[-1])

    def read(self) -> dict[str, Tensor]:
        """Return all weights of the model.

        Raises:
            KeyError: One is missing.
        """
        config, own = self._config, {"words.weight": self._one("words", "weight")}
        if config.has_positions:
            own["positions.weight"] = self._one("positions", "weight")
        if config.num_token_types:
            own["token_types"] = self._one("token_types", "weight")
        if config.num_buckets:
            own["relative"] = self._one("relative", "weight")
        norms = self._kinds(has_bias=config.has_norm_bias)
        own |= self._pair("norm", "norm", norms)
        if config.is_pre_norm:
            own |= self._pair("last_norm", "last_norm", norms)
        for number in range(config.num_layers):
            own |= self._layer(number)
        return own | self._head()

    def unknown(self) -> list[str]:
        """Return the names that no layer took and that no training needs, sorted."""
        rest = {name.removeprefix(self._prefix): name for name in self._weights if name not in self._taken}
        ignorable = (*self._family.ignorable, "embeddings.position_ids")
        return sorted(
            name for short, name in rest.items() if not short.startswith(ignorable) and not name.startswith(ignorable)
        )

    def _layer(self, number: int) -> dict[str, Tensor]:
        config, at = self._config, f"layers.{number}."
        own = {}
        for kind in self._kinds(has_bias=config.has_attention_bias):
            own[f"{at}query_key_value.{kind}"] = self._joined(("qkv",), ("query", "key", "value"), kind, number)
            own[f"{at}attention_output.{kind}"] = self._one("attention_output", kind, number)
        for kind in self._kinds(has_bias=config.has_mlp_bias):
            own[f"{at}up.{kind}"] = self._joined(("up",), ("gate", "factor"), kind, number)
            own[f"{at}down.{kind}"] = self._one("down", kind, number)
        norms = self._kinds(has_bias=config.has_norm_bias)
        if not (config.is_pre_norm and number == 0):
            own |= self._pair(f"{at}attention_norm", "attention_norm", norms, number)
        return own | self._pair(f"{at}output_norm", "output_norm", norms, number)

    def _head(self) -> dict[str, Tensor]:
        head, names = self._config.head, self._family.head
        if head is None:
            return {}
        own = {}
        for part, theirs in names.items():
            has_bias = {"pool": head.has_pool_bias, "norm": self._config.has_norm_bias}.get(part, True)
            for kind in self._kinds(has_bias=has_bias):
                own[f"head.{part}.{kind}"] = self._take(f"{theirs}.{kind}")
        return own

    @staticmethod
    def _kinds(*, has_bias: bool) -> tuple[str, ...]:
        return ("weight", "bias") if has_bias else ("weight",)

    def _pair(self, ours: str, theirs: str, kinds: tuple[str, ...], number: int = 0) -> dict[str, Tensor]:
        return {f"{ours}.{kind}": self._one(theirs, kind, number) for kind in kinds}

    def _joined(self, whole: tuple[str, ...], parts: tuple[str, ...], kind: str, number: int) -> Tensor:
        """Return one weight, of one name or of several joined, whichever the file has."""
        names = self._family.names
        for group in (whole, parts):
            if all(any(f"{self._prefix}{name.format(number)}.{kind}" in self._weights for name in names.get(each, ()))
                   for each in group):  # fmt: skip
                found = [self._one(each, kind, number) for each in group]
                return found[0] if len(found) == 1 else torch.cat(found)
        group = whole if whole[0] in names else parts
        return self._one(group[0], kind, number)  # raises, with its name

    def _one(self, part: str, kind: str, number: int = 0) -> Tensor:
        names = [f"{self._prefix}{name.format(number)}.{kind}" for name in self._family.names[part]]
        return self._take(next((name for name in names if name in self._weights), names[0]))

    def _take(self, name: str) -> Tensor:
        self._taken.add(name)
        return self._weights[name]
