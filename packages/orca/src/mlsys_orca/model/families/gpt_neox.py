"""GPT-NeoX and Pythia (Black et al., 2022): attention and MLP side by side, rotary positions on part of a head.

Hugging Face directories have query, key and value of each head beside each other; GGUF files all queries first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlsys_orca.model.blocks import MLP, Attention, Decoder, PreNormLayer, Step
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.family import Family
from mlsys_orca.model.gguf_config import GGUF_STEMS, GgufFields, config_from_gguf
from mlsys_orca.model.huggingface_config import config_from_huggingface
from mlsys_orca.model.layers import Embedding, Rotary
from mlsys_orca.model.operator_reader import OperatorReader
from mlsys_orca.model.weights.checkpoint import Layout
from torch import Tensor, nn

_STEMS: dict[Layout, dict[str, str]] = {
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


class ParallelLayer(PreNormLayer):
    """Both branches read the same state, each through its own norm."""

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Run the layer on ``x`` [num_tokens, hidden_size] fp32 -> same shape and dtype."""
        out: Tensor = x + self.attention(self.attention_norm(x), step) + self.mlp(self.mlp_norm(x))
        return out


def _layer(config: ModelConfig, read: OperatorReader, index: int) -> nn.Module:
    hidden, inner, at = config.hidden_size, config.intermediate_size, (index,)
    heads = config.num_heads * config.head_dim

    def projections_first(rows: Tensor) -> Tensor:
        """Reorder [heads, 3, head_dim] rows to [3, heads, head_dim] rows."""
        by_head = rows.view(config.num_heads, 3, config.head_dim, *rows.shape[1:])
        return by_head.transpose(0, 1).reshape(rows.shape)

    layer = ParallelLayer if config.parallel_residual else PreNormLayer
    return layer(
        attention_norm=read.layer_norm("attention_norm", hidden, at=at),
        attention=Attention(
            config,
            index,
            qkv=read.linear(
                {"qkv": 3 * heads},
                hidden,
                at=at,
                bias=config.qkv_bias,
                arrange={"qkv": projections_first} if read.layout in FAMILY.qkv_by_head else None,
            ),
            output=read.linear({"o": hidden}, heads, at=at, bias=config.output_bias),
        ),
        mlp_norm=read.layer_norm("mlp_norm", hidden, at=at),
        mlp=MLP(
            read.linear({"up": inner}, hidden, at=at, bias=config.mlp_bias),
            read.linear({"down": hidden}, inner, at=at, bias=config.mlp_bias),
            activation=config.activation,
        ),
    )


def _build(config: ModelConfig, read: OperatorReader) -> Decoder:
    table = read.matrix({"embedding": config.vocab_size}, config.hidden_size)
    return Decoder(
        config,
        embedding=Embedding(table),
        layers=(_layer(config, read, index) for index in range(config.num_layers)),
        norm=read.layer_norm("norm", config.hidden_size),
        head=read.head(table, tied=config.tied_embeddings),
        rotary=Rotary(config, device=read.device),
        dtype=read.dtype,
        device=read.device,
    )


FAMILY = Family(
    from_huggingface=_from_huggingface,
    from_gguf=_from_gguf,
    stems=_STEMS,
    build=_build,
    qkv_by_head=frozenset({"huggingface"}),
    ignorable_suffixes=(".attention.bias", ".attention.masked_bias", "embed_out.weight"),  # causal masks, a tied head
)
