"""Tiny language models of the transformers library, from their configurations, with padded batches and caches."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.oracles.nimble_zoo.sizes import VOCABULARY, tiny

MAX_PARAMETERS = 20_000_000
FEW = (  # in `make test`
    "BertForMaskedLM",
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "OPTForCausalLM",
    "T5ForConditionalGeneration",
    "DistilBertForMaskedLM",
)


class Language(NamedTuple):
    """A model, and what it is asked."""

    name: str
    config: Any  # its class
    model: Any
    is_decoder: bool
    is_pair: bool  # encoder and decoder

    @property
    def has_cache(self) -> bool:
        """True of what generates token by token."""
        return self.is_decoder or self.is_pair

    def make(self) -> nn.Module:
        """The model with random weights."""
        torch.manual_seed(0)
        made: nn.Module = self.model(tiny(self.config, self.name)).eval()
        for parameter in made.parameters():  # some begin with zeros, which say little
            with torch.no_grad():
                parameter.copy_(torch.randn_like(parameter) * 0.1)
        return made

    def batches(self) -> dict[str, dict[str, Tensor]]:
        """Batches of two, by how they are padded; ``"mixed"`` at both ends."""
        generator = torch.Generator().manual_seed(1)
        found: dict[str, dict[str, Tensor]] = {}
        for side in ("none", "left", "right", "mixed"):
            ids = torch.randint(3, VOCABULARY, (2, 7), generator=generator)
            mask = torch.ones_like(ids)
            if side in ("left", "mixed"):
                mask[0, :3] = 0
            if side in ("right", "mixed"):
                mask[1, 4:] = 0
            found[side] = {"input_ids": ids * mask, "attention_mask": mask}
            if self.is_pair:
                found[side]["decoder_input_ids"] = torch.randint(3, VOCABULARY, (2, 4), generator=generator)
        return found

    def calls(self, side: str) -> list[dict[str, Tensor]]:
        """The batch that a model is prepared with, another of its shape, and the first again.

        The second has other tokens and other padding: what a schedule took from the first must not decide its result.
        """
        batches = self.batches()
        return [batches[side], batches["mixed"], batches[side]]


def languages() -> Iterator[Language]:
    """Every class that the library's three mappings of language models name, in their order."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    seen: set[str] = set()
    for auto in (AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM):
        for config, models in auto._model_mapping.items():  # type: ignore[attr-defined]
            model = models[0] if isinstance(models, tuple) else models
            if model.__name__ not in seen:
                seen.add(model.__name__)
                kind = auto is AutoModelForCausalLM, auto is AutoModelForSeq2SeqLM
                yield Language(model.__name__, model.config_class or config, model, *kind)


def can_be_tiny(language: Language) -> str | None:
    """None if it is small and runs; else why it is left out."""
    try:
        with torch.device("meta"):
            count = sum(
                parameter.numel() for parameter in language.model(tiny(language.config, language.name)).parameters()
            )
        if count > MAX_PARAMETERS:
            return f"its smallest configuration here has {count:,} parameters"
        with torch.no_grad():
            language.make()(**language.batches()["left"])
    except Exception as error:  # noqa: BLE001 - the library's own, for sizes that do not go together
        return f"eager itself fails on such sizes: {type(error).__name__}"
    return None


CACHES = ("dynamic", "static", "own")


def with_cache(language: Language, side: str, kind: str = "dynamic") -> list[dict[str, Any]] | None:
    """A prompt and two more tokens, through one cache of keys and values.

    Args:
        kind: ``"dynamic"``; ``"static"``: of a fixed length; ``"own"``: what the model itself makes for a prompt, with
            the state of its recurrent layers where it has any.

    Returns:
        Its calls; None if eager itself does not take that cache.
    """
    from transformers import DynamicCache, EncoderDecoderCache, StaticCache

    model, batch = language.make(), language.batches()[side]
    calls: list[dict[str, Any]] = []
    with torch.no_grad():
        try:
            if kind == "own":
                name, cache = _own_cache(model(**batch, use_cache=True))
                begin: list[dict[str, Any]] = []
            else:
                name = "past_key_values"
                text = model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
                cache = DynamicCache(config=text) if kind == "dynamic" else StaticCache(config=text, max_cache_len=16)
                if language.is_pair:
                    cache = EncoderDecoderCache(cache, DynamicCache(config=text))
                begin = [{**batch, name: cache, "use_cache": True}]
            calls = begin + _next_tokens(language, batch, {name: cache, "use_cache": True})
            for call in copy.deepcopy(calls):
                model(**call)
        except Exception:  # noqa: BLE001 - the library's own, where a model has another kind of cache
            return None
    return calls


def _own_cache(result: Any) -> tuple[str, Any]:
    for name in ("past_key_values", "cache_params", "state"):
        if getattr(result, name, None) is not None:
            return name, getattr(result, name)
    raise LookupError("the model makes no cache")


def _next_tokens(language: Language, batch: dict[str, Tensor], cache: dict[str, Any]) -> list[dict[str, Any]]:
    """Two calls with one token each."""
    calls: list[dict[str, Any]] = []
    mask = batch["attention_mask"]
    for token in (5, 9):
        ids = torch.full((2, 1), token)
        if language.is_pair:
            calls.append({**batch, "decoder_input_ids": ids, **cache})
            continue
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        calls.append({"input_ids": ids, "attention_mask": mask, **cache})
    return calls
