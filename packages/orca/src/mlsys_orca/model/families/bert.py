"""BERT (Devlin et al., 2019), MiniLM, BGE, E5 and most sentence encoders; RoBERTa and XLM-R, which differ in names.

RoBERTa's positions begin in the row after that of its padding token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlsys_orca.model.config import activation_name, refuse
from mlsys_orca.model.encoder_family import EncoderConfig, EncoderFamily
from mlsys_orca.model.huggingface_config import refuse_common, require


def _stems(prefix: str, *, pool: str, score: str) -> dict[str, str]:
    return {
        "pool": pool,
        "score": score,
        "embedding": f"{prefix}.embeddings.word_embeddings",
        "positions": f"{prefix}.embeddings.position_embeddings",
        "types": f"{prefix}.embeddings.token_type_embeddings",
        "norm": f"{prefix}.embeddings.LayerNorm",
        "q": prefix + ".encoder.layer.{}.attention.self.query",
        "k": prefix + ".encoder.layer.{}.attention.self.key",
        "v": prefix + ".encoder.layer.{}.attention.self.value",
        "o": prefix + ".encoder.layer.{}.attention.output.dense",
        "attention_norm": prefix + ".encoder.layer.{}.attention.output.LayerNorm",
        "up": prefix + ".encoder.layer.{}.intermediate.dense",
        "down": prefix + ".encoder.layer.{}.output.dense",
        "mlp_norm": prefix + ".encoder.layer.{}.output.LayerNorm",
    }


def _from_huggingface(raw: Mapping[str, Any]) -> EncoderConfig:
    require(raw, "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    require(raw, "max_position_embeddings")
    refuse_common(raw, is_causal=False)
    refuse(bool(raw.get("is_decoder")), "attention to earlier tokens only (is_decoder)")
    positions = raw.get("position_embedding_type", "absolute")
    refuse(positions != "absolute", f"positions of type {positions!r} (absolute ones are)")
    architecture = raw["model_type"]
    offset = 0 if architecture == "bert" else raw.get("pad_token_id", 1) + 1
    return EncoderConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        max_positions=raw["max_position_embeddings"] - offset,
        position_offset=offset,
        num_token_types=raw.get("type_vocab_size", 2),
        norm_eps=raw.get("layer_norm_eps", 1e-12),
        activation=activation_name(raw.get("hidden_act", "gelu")),
    )


FAMILY = EncoderFamily(
    from_huggingface=_from_huggingface,
    stems=_stems("bert", pool="bert.pooler.dense", score="classifier"),
    ignorable_prefixes=("bert.pooler.", "pooler.", "cls.", "classifier."),
)
ROBERTA = EncoderFamily(
    from_huggingface=_from_huggingface,
    stems=_stems("roberta", pool="classifier.dense", score="classifier.out_proj"),
    ignorable_prefixes=("roberta.pooler.", "pooler.", "lm_head.", "classifier."),
)
