"""Falcon (Almazrouei et al., 2023): query heads beside the key and value that they share, biases or none.

Its branches are parallel behind one norm or two, or one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from mlsys_orca.model import assembly
from mlsys_orca.model.blocks import Attention, ParallelLayer
from mlsys_orca.model.config import ModelConfig, activation_name, refuse
from mlsys_orca.model.config_readers import GGUF_STEMS, GgufFields, config_from_gguf, config_from_huggingface
from mlsys_orca.model.family import Family, Stems
from mlsys_orca.model.operator_reader import OperatorReader
from torch import Tensor, nn

_STEMS: Stems = {
    "gguf": {**GGUF_STEMS, "mlp_norm": "blk.{}.attn_norm", "attention_norm_2": "blk.{}.attn_norm_2"},
    "huggingface": {
        "embedding": "transformer.word_embeddings",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "attention_norm": "transformer.h.{}.input_layernorm",
        "attention_norm_2": "transformer.h.{}.ln_attn",  # of those that have two
        "mlp_norm": "transformer.h.{}.ln_mlp",
        "second_norm": "transformer.h.{}.post_attention_layernorm",  # of branches one after the other
        "qkv": "transformer.h.{}.self_attention.query_key_value",
        "o": "transformer.h.{}.self_attention.dense",
        "up": "transformer.h.{}.mlp.dense_h_to_4h",
        "down": "transformer.h.{}.mlp.dense_4h_to_h",
    },
}


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    refuse(bool(raw.get("alibi")), "biases by distance that are rounded to bf16 (alibi)")
    is_new, heads = bool(raw.get("new_decoder_architecture", False)), raw.get("num_attention_heads")
    hidden, biased = raw.get("hidden_size") or raw.get("n_embed"), bool(raw.get("bias", False))
    kv_heads = (raw.get("num_kv_heads") or heads) if is_new or not raw.get("multi_query", True) else 1
    refuse(not is_new and kv_heads not in (1, heads), "num_kv_heads without new_decoder_architecture")
    is_parallel = bool(raw.get("parallel_attn", True))
    refuse(is_new and not is_parallel, "branches one after the other (parallel_attn) of a new_decoder_architecture")
    older = {
        "hidden_size": hidden,
        "intermediate_size": raw.get("ffn_hidden_size") or 4 * (hidden or 0),
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": True,
    }
    return config_from_huggingface(
        older | {key: value for key, value in raw.items() if key not in older or key == "tie_word_embeddings"},
        "falcon",
        norm_eps=raw.get("layer_norm_epsilon", 1e-5),
        activation=activation_name(raw.get("activation", "gelu")),
        parallel_residual=is_parallel,
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=biased,
    )


def _from_gguf(fields: GgufFields) -> ModelConfig:
    return config_from_gguf(fields, norm="layer", activation="gelu", parallel_residual=True)


def _attention(config: ModelConfig, read: OperatorReader, index: int) -> Attention:
    heads, kv_heads = config.num_heads, config.num_kv_heads

    def projections_first(rows: Tensor) -> Tensor:
        """Reorder [kv_heads, its query heads, key, value] of heads to all queries, all keys, all values."""
        by_group = rows.view(kv_heads, heads // kv_heads + 2, config.head_dim, *rows.shape[1:])
        return torch.cat([part.flatten(0, 2) for part in (by_group[:, :-2], by_group[:, -2:-1], by_group[:, -1:])])

    arrange = projections_first if read.layout in FAMILY.qkv_by_head else None
    return assembly.read_joined_attention(config, read, index, arrange=arrange)


def _layer(config: ModelConfig, read: OperatorReader, index: int) -> nn.Module:
    def norm(reader: OperatorReader, role: str, size: int, *, at: tuple[int, ...]) -> nn.Module:
        is_second = role == "mlp_norm" and not config.parallel_residual
        return reader.layer_norm("second_norm" if is_second else role, size, at=at)

    attention, mlp = _attention, assembly.read_plain_mlp
    if not read.has("attention_norm_2", at=(index,)):
        return assembly.read_layer(config, read, index, attention=attention, mlp=mlp, norm=norm)
    return ParallelLayer(
        attention_norm=read.layer_norm("attention_norm_2", config.hidden_size, at=(index,)),
        attention=attention(config, read, index),
        mlp_norm=read.layer_norm("mlp_norm", config.hidden_size, at=(index,)),
        mlp=mlp(config, read, index),
    )


FAMILY = Family(
    from_huggingface=_from_huggingface,
    from_gguf=_from_gguf,
    stems=_STEMS,
    build=partial(assembly.build, layer=_layer, norm=OperatorReader.layer_norm),
    qkv_by_head=frozenset({"huggingface"}),
)
