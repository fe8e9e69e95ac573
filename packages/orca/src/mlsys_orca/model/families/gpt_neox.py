"""GPT-NeoX and Pythia (Black et al., 2022): attention and MLP side by side, rotary positions on part of a head.

Hugging Face directories have query, key and value of each head beside each other; GGUF files all queries first.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mlsys_orca.model import assembly
from mlsys_orca.model.blocks import Attention
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.config_readers import GGUF_STEMS, GgufFields, config_from_gguf, config_from_huggingface
from mlsys_orca.model.family import Family, Stems
from mlsys_orca.model.operator_reader import OperatorReader
from torch import Tensor

_STEMS: Stems = {
    "gguf": GGUF_STEMS,
    "huggingface": {
        "embedding": "gpt_neox.embed_in",
        "norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
        "attention_norm": "gpt_neox.layers.{}.input_layernorm",
        "qkv": "gpt_neox.layers.{}.attention.query_key_value",
        "o": "gpt_neox.layers.{}.attention.dense",
        "mlp_norm": "gpt_neox.layers.{}.post_attention_layernorm",
        "up": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
        "down": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
    },
}


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    # The names that files had before transformers 5, under those that the shared reader knows.
    older = {
        "partial_rotary_factor": raw.get("rotary_pct", 0.25),
        "rope_theta": raw.get("rotary_emb_base", 10_000.0),
        "hidden_act": "gelu",
        "attention_bias": True,
    }
    return config_from_huggingface(
        older | dict(raw) | {"num_key_value_heads": None},
        "gpt_neox",
        partial_rotary=True,
        norm_eps=raw.get("layer_norm_eps", 1e-5),
        parallel_residual=bool(raw.get("use_parallel_residual", True)),
        mlp_bias=True,
    )


def _from_gguf(fields: GgufFields) -> ModelConfig:
    return config_from_gguf(
        fields,
        norm="layer",
        partial_rotary=True,
        activation="gelu",
        parallel_residual=bool(fields.get("use_parallel_residual", True)),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )


def read_attention(config: ModelConfig, read: OperatorReader, index: int) -> Attention:
    """Read attention of layer ``index``; in directories query, key and value of a head stand together."""

    def projections_first(values: Tensor) -> Tensor:
        """Reorder [heads, 3, head_dim] rows to [3, heads, head_dim] rows."""
        of_heads = values.view(config.num_heads, 3, config.head_dim, *values.shape[1:])
        return of_heads.transpose(0, 1).reshape(values.shape)

    arrange = projections_first if read.layout in FAMILY.qkv_by_head else None
    return assembly.read_joined_attention(config, read, index, arrange=arrange)


FAMILY = Family(
    from_huggingface=_from_huggingface,
    from_gguf=_from_gguf,
    stems=_STEMS,
    build=partial(
        assembly.build,
        attention=read_attention,
        mlp=assembly.read_plain_mlp,
        norm=OperatorReader.layer_norm,
        has_two_norms=True,
    ),
    qkv_by_head=frozenset({"huggingface"}),
    ignorable_suffixes=(".attention.bias", ".attention.masked_bias", "embed_out.weight"),  # causal masks, a tied head
)
