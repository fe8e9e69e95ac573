"""DistilBERT (Sanh et al., 2019): BERT with half the layers and no token types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlsys_orca.model.config import activation_name
from mlsys_orca.model.encoder_family import EncoderConfig, EncoderFamily
from mlsys_orca.model.huggingface_config import refuse_common, require

_STEMS = {
    "embedding": "distilbert.embeddings.word_embeddings",
    "positions": "distilbert.embeddings.position_embeddings",
    "norm": "distilbert.embeddings.LayerNorm",
    "q": "distilbert.transformer.layer.{}.attention.q_lin",
    "k": "distilbert.transformer.layer.{}.attention.k_lin",
    "v": "distilbert.transformer.layer.{}.attention.v_lin",
    "o": "distilbert.transformer.layer.{}.attention.out_lin",
    "attention_norm": "distilbert.transformer.layer.{}.sa_layer_norm",
    "up": "distilbert.transformer.layer.{}.ffn.lin1",
    "down": "distilbert.transformer.layer.{}.ffn.lin2",
    "mlp_norm": "distilbert.transformer.layer.{}.output_layer_norm",
    "pool": "pre_classifier",
    "score": "classifier",
}


def _from_huggingface(raw: Mapping[str, Any]) -> EncoderConfig:
    require(raw, "dim", "hidden_dim", "n_layers", "n_heads", "vocab_size", "max_position_embeddings")
    refuse_common(raw, is_causal=False)
    return EncoderConfig(
        architecture="distilbert",
        vocab_size=raw["vocab_size"],
        hidden_size=raw["dim"],
        intermediate_size=raw["hidden_dim"],
        num_layers=raw["n_layers"],
        num_heads=raw["n_heads"],
        max_positions=raw["max_position_embeddings"],
        norm_eps=1e-12,
        activation=activation_name(raw.get("activation", "gelu")),
    )


FAMILY = EncoderFamily(
    from_huggingface=_from_huggingface,
    stems=_STEMS,
    ignorable_prefixes=("vocab_transform.", "vocab_layer_norm.", "vocab_projector.", "pre_classifier.", "classifier."),
    head_activation="relu",
)
