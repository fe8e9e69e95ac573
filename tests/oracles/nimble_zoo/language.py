"""Tiny language models of the transformers library, from their configurations, with padded batches and caches."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

VOCABULARY = 97
SMALL: dict[str, Any] = {  # every name that some configuration has for one of its sizes
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size", "word_embed_proj_dim"), 32
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"), 2),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "num_experts_per_tok", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_experts", "num_local_experts", "n_local_experts"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim", "hidden_dim", "d_inner"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("max_seq_len", "max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim", "relative_attention_num_buckets"), 8),
    **dict.fromkeys(("sliding_window", "window_size"), 4),
    "moe_intermediate_size": 32,
    "expansion_ratio": 2,
    "type_vocab_size": 2,
    "attention_types": [[["global", "local"], 1]],
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
MAX_PARAMETERS = 3_000_000
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

    def make(self) -> nn.Module:
        """The model with random weights."""
        torch.manual_seed(0)
        made: nn.Module = self.model(tiny(self.config)).eval()
        for parameter in made.parameters():  # some begin with zeros, which say little
            with torch.no_grad():
                parameter.copy_(torch.randn_like(parameter) * 0.1)
        return made

    def batches(self) -> dict[str, dict[str, Tensor]]:
        """Batches of two, by how they are padded."""
        generator = torch.Generator().manual_seed(1)
        found: dict[str, dict[str, Tensor]] = {}
        for side in ("none", "left", "right"):
            ids = torch.randint(3, VOCABULARY, (2, 7), generator=generator)
            mask = torch.ones_like(ids)
            if side != "none":
                mask[0, slice(0, 3) if side == "left" else slice(4, 7)] = 0
            found[side] = {"input_ids": ids * mask, "attention_mask": mask}
            if self.is_pair:
                found[side]["decoder_input_ids"] = torch.randint(3, VOCABULARY, (2, 4), generator=generator)
        return found


def tiny(config: Any) -> Any:
    """A configuration with all sizes small."""
    names = set(inspect.signature(config.__init__).parameters)
    if dataclasses.is_dataclass(config):
        names |= {field.name for field in dataclasses.fields(config)}
    return config(**{name: value for name, value in SMALL.items() if name in names})


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
                yield Language(model.__name__, config, model, *kind)


def can_be_tiny(language: Language) -> str | None:
    """None if it is small and runs; else why it is left out."""
    try:
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in language.model(tiny(language.config)).parameters())
        if count > MAX_PARAMETERS:
            return f"its smallest configuration here has {count:,} parameters"
        with torch.no_grad():
            language.make()(**language.batches()["left"])
    except Exception as error:  # noqa: BLE001 - the library's own, for sizes that do not go together
        return f"eager itself fails on such sizes: {type(error).__name__}"
    return None


def with_cache(language: Language, side: str) -> list[dict[str, Any]]:
    """A prompt and two more tokens, through one cache of keys and values."""
    from transformers import DynamicCache

    cache = DynamicCache()
    batch = language.batches()[side]
    calls: list[dict[str, Any]] = [{**batch, "past_key_values": cache, "use_cache": True}]
    mask = batch["attention_mask"]
    for token in (5, 9):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        ids = torch.full((2, 1), token)
        calls.append({"input_ids": ids, "attention_mask": mask, "past_key_values": cache, "use_cache": True})
    return calls
