"""Sentence vectors as a folder of sentence-transformers asks for them: prompts, pooling, Dense, length, cutting."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlsys_core.errors import InvalidInputError

from mlsys_encoders.models.pooling import POOLINGS

_KEYS = {  # keys of a pooling's config.json
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_DENSE_ACTIVATIONS = {"Tanh": "tanh", "Identity": "identity", "ReLU": "relu", "GELU": "gelu", "Sigmoid": "sigmoid"}
_OUTPUTS = ("last_hidden_state", "logits")
_TEXT_KEYS = {  # of sentence_bert_config.json, beside those that are read; values: what is computed here, or None: any
    "transformer_task": ("feature-extraction", "sequence-classification"),
    "modality_config": tuple({"text": {"method": "forward", "method_output_name": name}} for name in _OUTPUTS),
    "module_output_name": ("token_embeddings", "scores"),
    "unpad_inputs": None,
}
_MODEL_KEYS = {  # of config_sentence_transformers.json
    "__version__": None,
    "model_type": ("SentenceTransformer",),
    "similarity_fn_name": None,  # of two vectors
}
_SENTENCE = ("sentence_embedding",)
_LARGEST = 1 << 20  # largest size of a Dense module
_MOST_MODULES = 16
_MOST_PROMPT_CHARS = 1 << 16


@dataclass(frozen=True, slots=True)
class DenseForm:
    """Dense module of a folder: a product and an activation."""

    path: str  # folder of its weights, below the encoder's
    in_features: int
    out_features: int
    has_bias: bool
    activation: str  # a name of layers.ACTIVATIONS


@dataclass(frozen=True, slots=True)
class SentenceForm:
    """Rules of a folder for turning texts into tokens, and last hidden states into a request's vector."""

    poolings: tuple[str, ...] = ("mean",)  # names of pooling.POOLINGS; their vectors are concatenated
    is_normalised: bool = True  # scaled to length 1 at the end
    max_tokens: int | None = None  # longer texts are cut; None: as many as the model takes
    is_lower_case: bool = False  # texts are, before they are cut into tokens
    denses: tuple[DenseForm, ...] = ()  # behind the pooling, in this order
    prompts: tuple[tuple[str, str], ...] = ()  # name and what goes before a text
    default_prompt: str | None = None  # name of the prompt for texts without one
    has_types: bool = True  # the two texts of a pair are told apart, where the encoder has types

    def prompt(self, name: str | None) -> str:
        """Return what goes before a text.

        Args:
            name: Name of a prompt; None: the folder's default, if it has one.

        Raises:
            InvalidInputError: The folder has no such prompt.
        """
        known = dict(self.prompts)
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in known:
            there = ", ".join(known) or "none"
            raise InvalidInputError(f"prompt_name is {name!r}; this model's prompts are: {there}")
        return known[name]


def read_sentence_form(folder: Path, hidden_size: int, *, has_head: bool) -> SentenceForm:
    """Return what ``folder`` asks for; a folder without ``modules.json`` gets the mean of its tokens, of length 1.

    Args:
        folder: In Hugging Face layout.
        hidden_size: Features of a token's state.
        has_head: True for a classifier, whose pooling is its own.

    Raises:
        InvalidInputError: It asks for something else than a sentence vector, or for one that is not known here.
    """
    texts, tokens = read_settings(folder / "sentence_bert_config.json"), read_settings(folder / "tokenizer_config.json")
    require_known(folder / "sentence_bert_config.json", texts, "max_seq_length", "do_lower_case", **_TEXT_KEYS)
    if not isinstance(given := tokens.get("model_input_names") or ["token_type_ids"], list):
        raise InvalidInputError(f"{folder}: model_input_names is {given!r}: a list of names is needed")
    has_types = "token_type_ids" in given
    key, max_tokens = "max_seq_length", texts.get("max_seq_length")
    if max_tokens is None:  # newer folders keep the limit there
        key, max_tokens = "model_max_length", tokens.get("model_max_length")
        max_tokens = int(max_tokens) if isinstance(max_tokens, float) and max_tokens.is_integer() else max_tokens
    if max_tokens is not None and (not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1):
        raise InvalidInputError(f"{folder}: {key} is {max_tokens!r}: give a whole number of tokens from 1 on")
    is_lower_case = bool(texts.get("do_lower_case", False))
    if has_head:
        if (folder / "modules.json").is_file() and _kinds(folder)[0] != ["Transformer"]:
            raise InvalidInputError(f"{folder}: got modules behind a classifier's head, which are not computed here")
        return SentenceForm(max_tokens=max_tokens, is_lower_case=is_lower_case, has_types=has_types)
    prompts, default = _prompts(folder)
    form = SentenceForm(
        max_tokens=max_tokens,
        is_lower_case=is_lower_case,
        prompts=prompts,
        default_prompt=default,
        has_types=has_types,
    )
    if not (folder / "modules.json").is_file():
        return form
    poolings, denses, is_normalised = _modules(folder, hidden_size, has_prompts=any(text for _, text in prompts))
    return replace(form, poolings=poolings, denses=denses, is_normalised=is_normalised)


def read_settings(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty where there is no file.

    Raises:
        InvalidInputError: It cannot be read, or holds something else.
    """
    return _object(path) if path.is_file() else {}


def require_known(path: Path, raw: Mapping[str, Any], *read: str, **values: Sequence[Any] | None) -> None:
    """Refuse a file's settings that nothing here obeys, by name.

    Args:
        path: The file.
        raw: Its settings; null, false and what is empty ask for nothing.
        read: Keys that are read elsewhere.
        values: By other key: values that are what is computed here anyway; None: any.

    Raises:
        InvalidInputError: There is another key, or another value.

    Example:
        >>> require_known(Path("a.json"), {"size": 4, "kind": "b", "more": None}, "size", kind=("b",))
        >>> require_known(Path("a.json"), {"kind": "c"}, kind=("b",))
        Traceback (most recent call last):
            ...
        mlsys_core.errors.InvalidInputError: a.json: kind is 'c', which is not done here; known is 'b'
    """
    for key, value in raw.items():
        allowed = values.get(key, ())
        if key not in read and value and allowed is not None and value not in allowed:
            known = f"; known is {' or '.join(map(repr, allowed))}" if allowed else ""
            raise InvalidInputError(f"{path}: {key} is {value!r}, which is not done here{known}")


def _prompts(folder: Path) -> tuple[tuple[tuple[str, str], ...], str | None]:
    """Read the prompts of ``config_sentence_transformers.json`` and the name of the default one."""
    path = folder / "config_sentence_transformers.json"
    raw = read_settings(path)
    if (size := raw.get("truncate_dim")) is not None:
        raise InvalidInputError(
            f"{path}: truncate_dim is {size!r}, which is not done here: remove it and ask for `dimensions` in requests"
        )
    require_known(path, raw, "prompts", "default_prompt_name", **_MODEL_KEYS)
    prompts, default = raw.get("prompts") or {}, raw.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(
        isinstance(text, str) and len(text) <= _MOST_PROMPT_CHARS for text in prompts.values()
    ):
        raise InvalidInputError(f"{path}: prompts is no object of texts by name")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise InvalidInputError(f"{path}: default_prompt_name is {default!r}, which is none of its prompts")
    return tuple(prompts.items()), default


def _kinds(folder: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the last part of each module's type, and the modules."""
    modules = _read(folder / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise InvalidInputError(f"{folder / 'modules.json'}: a list of objects is needed")
    return [str(each.get("type", "")).rsplit(".", 1)[-1] for each in modules], modules


def _modules(
    folder: Path, hidden_size: int, *, has_prompts: bool
) -> tuple[tuple[str, ...], tuple[DenseForm, ...], bool]:
    """Read ``modules.json``: an encoder, its pooling, Dense modules, and perhaps normalisation."""
    kinds, modules = _kinds(folder)
    is_normalised = len(kinds) > 2 and kinds[-1] == "Normalize"
    between = kinds[2 : len(kinds) - is_normalised]
    is_known = kinds[:2] == ["Transformer", "Pooling"] and set(between) <= {"Dense"} and len(kinds) <= _MOST_MODULES
    if not is_known or modules[0].get("path"):
        raise InvalidInputError(
            f"{folder / 'modules.json'}: got {', '.join(kinds[:_MOST_MODULES]) or 'no modules'}; known here are "
            "Transformer (in the folder itself), Pooling, Dense and Normalize, in this order"
        )
    path = _inside(folder, modules[1]) / "config.json"
    asked = _object(path)
    sizes = ("word_embedding_dimension", "embedding_dimension")
    require_known(
        path, asked, *sizes, "include_prompt", "pooling_mode", *(k for k in asked if k.startswith("pooling_mode_"))
    )
    size = asked.get("word_embedding_dimension", asked.get("embedding_dimension", hidden_size))
    if size != hidden_size:
        raise InvalidInputError(f"{path}: pools vectors of {size!r} numbers, and the encoder gives {hidden_size!r}")
    if has_prompts and not asked.get("include_prompt", True):
        raise InvalidInputError(f"{path}: pooling without the prompt (include_prompt) is not done here")
    mode = asked.get("pooling_mode")
    named: Sequence[object] = mode if isinstance(mode, list) else [] if mode is None else [mode]
    wanted = {str(name) for name in named}
    wanted |= {_KEYS.get(key, key) for key, value in asked.items() if key.startswith("pooling_mode_") and value}
    if not wanted or not wanted <= POOLINGS.keys():
        raise InvalidInputError(
            f"{path}: asks for the pooling {', '.join(sorted(wanted)) or 'of no mode'}; known are {', '.join(POOLINGS)}"
        )
    if is_normalised:
        path = _inside(folder, modules[-1]) / "config.json"
        require_known(path, read_settings(path), module_input_name=_SENTENCE, module_output_name=_SENTENCE)
    denses, width = [], hidden_size * len(wanted)
    for module in modules[2 : 2 + len(between)]:
        denses.append(_dense(folder, module, width))
        width = denses[-1].out_features
    return tuple(name for name in POOLINGS if name in wanted), tuple(denses), is_normalised


def _dense(folder: Path, module: Mapping[str, Any], width: int) -> DenseForm:
    path = _inside(folder, module) / "config.json"
    raw = _object(path)
    sizes = raw.get("in_features"), raw.get("out_features")
    if sizes[0] != width or not isinstance(sizes[1], int) or not 1 <= sizes[1] <= _LARGEST:
        raise InvalidInputError(f"{path}: a product of {sizes[0]!r} to {sizes[1]!r} numbers, behind vectors of {width}")
    activation = str(raw.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    if activation not in _DENSE_ACTIVATIONS:
        known = ", ".join(_DENSE_ACTIVATIONS)
        raise InvalidInputError(f"{path}: the activation {activation!r} is not known here; {known} are")
    require_known(
        path,
        raw,
        *("in_features", "out_features", "activation_function", "bias"),
        module_input_name=_SENTENCE,
        module_output_name=_SENTENCE,
    )
    is_biased = bool(raw.get("bias", True))
    return DenseForm(str(module.get("path", "")), width, sizes[1], is_biased, _DENSE_ACTIVATIONS[activation])


def _inside(folder: Path, module: Mapping[str, Any]) -> Path:
    path = folder / str(module.get("path", ""))
    if not path.resolve().is_relative_to(folder.resolve()):
        raise InvalidInputError(f"{folder / 'modules.json'}: a module's folder lies outside of the encoder's folder")
    return path


def _object(path: Path) -> dict[str, Any]:
    value = _read(path)
    if not isinstance(value, dict):
        raise InvalidInputError(f"{path}: got a {type(value).__name__}; an object is needed")
    return value


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path} cannot be read: {str(error) or type(error).__name__}") from error
