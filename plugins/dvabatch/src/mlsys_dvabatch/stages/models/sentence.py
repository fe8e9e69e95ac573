"""Sentence vectors as a folder of sentence-transformers asks for them: pooling, normalisation, cutting of texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor
from torch.nn import functional

_PLAIN = ("Model", "ForMaskedLM", "ForPreTraining")  # architectures whose encoder alone gives sentence vectors


def _mean(hidden: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    return (hidden * mask).sum(1) / lengths


def _weighted(hidden: Tensor, mask: Tensor, _: Tensor) -> Tensor:
    weights = mask * torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[None, :, None]
    return (hidden * weights).sum(1) / weights.sum(1)


def _last(hidden: Tensor, _: Tensor, lengths: Tensor) -> Tensor:
    return hidden[torch.arange(len(hidden), device=hidden.device), lengths[:, 0].long() - 1]


# Of hidden [requests, tokens, features], mask [requests, tokens, 1] and lengths [requests, 1]; in the order of results.
POOLINGS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cls": lambda hidden, _, __: hidden[:, 0],
    "max": lambda hidden, mask, _: hidden.masked_fill(~mask, -torch.inf).amax(1),
    "mean": _mean,
    "mean_sqrt_len_tokens": lambda hidden, mask, lengths: (hidden * mask).sum(1) / lengths.sqrt(),
    "weightedmean": _weighted,
    "lasttoken": _last,
}
_KEYS = {  # of a pooling's config.json
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, slots=True)
class SentenceForm:
    """Rules of a folder for cutting texts to tokens, and for pooling last hidden states to a request's vector."""

    poolings: tuple[str, ...] = ("mean",)  # of :data:`POOLINGS`; their vectors are put one after another
    is_normalised: bool = True  # to length 1
    max_tokens: int | None = None  # longer texts are cut; None: as many as the model takes
    is_lower_case: bool = False  # texts are, before they are cut into tokens

    def pool(self, hidden: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        """Return a vector of each request.

        Args:
            hidden: Last hidden states, [requests, tokens, features].
            mask: True where there is a token, [requests, tokens].
            lengths: Tokens of each request, [requests].
        """
        parts = [POOLINGS[name](hidden, mask[..., None], lengths[:, None]) for name in self.poolings]
        vector = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return functional.normalize(vector, dim=-1) if self.is_normalised else vector


def read_sentence_form(folder: Path, config: Mapping[str, Any]) -> SentenceForm:
    """Return what ``folder`` asks for; a folder without ``modules.json`` gets the mean of its tokens, of length 1.

    Args:
        folder: In Hugging Face layout.
        config: Its ``config.json``.

    Raises:
        InvalidInputError: It asks for something else than a sentence vector, or for one that is not known here.
    """
    architectures = config.get("architectures") or []
    for name in architectures if isinstance(architectures, list) else [architectures]:
        if not str(name).endswith(_PLAIN):
            raise InvalidInputError(
                f"{folder}: got architecture {name!r}, whose head is more than the encoder; served here are sentence "
                "vectors of plain encoders: export this model with torch.export and serve the .pt2"
            )
    texts = _object(folder / "sentence_bert_config.json") if (folder / "sentence_bert_config.json").is_file() else {}
    max_tokens = texts.get("max_seq_length")
    if max_tokens is not None and (not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1):
        raise InvalidInputError(f"{folder}: max_seq_length is {max_tokens!r}: give a whole number of tokens from 1 on")
    prompts = folder / "config_sentence_transformers.json"
    if prompts.is_file() and (name := _object(prompts).get("default_prompt_name")) is not None:
        raise InvalidInputError(
            f"{folder}: texts are to get the prompt {name!r} first, which is not done here; set default_prompt_name to "
            f"null in {prompts.name} and let clients send it"
        )
    poolings: tuple[str, ...] = ("mean",)
    is_normalised = True
    if (folder / "modules.json").is_file():
        poolings, is_normalised = _modules(folder, config.get("hidden_size"))
    return SentenceForm(poolings, is_normalised, max_tokens, bool(texts.get("do_lower_case", False)))


def _modules(folder: Path, hidden_size: object) -> tuple[tuple[str, ...], bool]:
    """Read ``modules.json``: an encoder, its pooling, and perhaps normalisation."""
    modules = _read(folder / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise InvalidInputError(f"{folder / 'modules.json'}: a list of objects is needed")
    kinds = [str(each.get("type", "")).rsplit(".", 1)[-1] for each in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]) or modules[0].get("path"):
        raise InvalidInputError(
            f"{folder / 'modules.json'}: got {', '.join(kinds) or 'no modules'}; known here are Transformer (in the "
            "folder itself), Pooling and Normalize, in this order"
        )
    path = folder / str(modules[1].get("path", "")) / "config.json"
    if not path.resolve().is_relative_to(folder.resolve()):
        raise InvalidInputError(f"{folder / 'modules.json'}: its pooling lies outside of the folder")
    asked = _object(path)
    size = asked.get("word_embedding_dimension", asked.get("embedding_dimension", hidden_size))
    if size != hidden_size:
        raise InvalidInputError(f"{path}: pools vectors of {size!r} numbers, and the encoder gives {hidden_size!r}")
    mode = asked.get("pooling_mode")
    named: Sequence[object] = mode if isinstance(mode, list) else [] if mode is None else [mode]
    wanted = {str(name) for name in named}
    wanted |= {_KEYS.get(key, key) for key, value in asked.items() if key.startswith("pooling_mode_") and value}
    if not wanted or not wanted <= POOLINGS.keys():
        raise InvalidInputError(
            f"{path}: asks for the pooling {', '.join(sorted(wanted)) or 'of no mode'}; known are {', '.join(POOLINGS)}"
        )
    return tuple(name for name in POOLINGS if name in wanted), len(kinds) == 3


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
