"""Llama and what has its shape (SmolLM, Mistral): RMSNorm, rotary positions, grouped heads, a gated MLP.

Also the base of the families that differ from it in one part only (:mod:`.qwen2`, :mod:`.qwen3`, :mod:`.phi3`,
:mod:`.mixtral`), which take its names and its :func:`build`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mlsys_orca.model.blocks import Attention, Decoder, GatedMLP, PreNormLayer, RotatedBy
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.experts import GGUF_EXPERTS, expert_fields, read_experts
from mlsys_orca.model.family import Family
from mlsys_orca.model.gguf_config import GGUF_STEMS, GgufFields, config_from_gguf
from mlsys_orca.model.huggingface_config import config_from_huggingface
from mlsys_orca.model.layers import Embedding, Rotary
from mlsys_orca.model.operator_reader import Arrange, OperatorReader
from mlsys_orca.model.weights.checkpoint import Layout
from torch import Tensor, nn

STEMS: dict[Layout, dict[str, str]] = {
    "gguf": GGUF_STEMS | GGUF_EXPERTS,
    "huggingface": {
        "embedding": "model.embed_tokens",
        "norm": "model.norm",
        "head": "lm_head",
        "attention_norm": "model.layers.{}.input_layernorm",
        "q": "model.layers.{}.self_attn.q_proj",
        "k": "model.layers.{}.self_attn.k_proj",
        "v": "model.layers.{}.self_attn.v_proj",
        "o": "model.layers.{}.self_attn.o_proj",
        "mlp_norm": "model.layers.{}.post_attention_layernorm",
        "gate": "model.layers.{}.mlp.gate_proj",
        "up": "model.layers.{}.mlp.up_proj",
        "down": "model.layers.{}.mlp.down_proj",
    },
}

AttentionBuilder = Callable[[ModelConfig, OperatorReader, int], Attention]
MLPBuilder = Callable[[ModelConfig, OperatorReader, int], nn.Module]


def read_attention(
    config: ModelConfig,
    read: OperatorReader,
    index: int,
    *,
    arrange: Mapping[str, Arrange] | None = None,
    qk_norm: nn.Module | None = None,
) -> Attention:
    """Read attention of layer ``index`` from separate query, key and value projections."""
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows, hidden, at = {"q": q_rows, "k": kv_rows, "v": kv_rows}, config.hidden_size, (index,)
    return Attention(
        config,
        index,
        qkv=read.linear(rows, hidden, at=at, bias=config.qkv_bias, arrange=arrange),
        output=read.linear({"o": hidden}, q_rows, at=at, bias=config.output_bias),
        qk_norm=qk_norm,
    )


def read_mlp(config: ModelConfig, read: OperatorReader, index: int) -> nn.Module:
    """Read the MLP of layer ``index`` from separate gate and up projections, or its experts."""
    if config.num_experts:
        return read_experts(config, read, index)
    hidden, inner, at = config.hidden_size, config.intermediate_size, (index,)
    return GatedMLP(
        read.linear({"gate": inner, "up": inner}, hidden, at=at, bias=config.mlp_bias),
        read.linear({"down": hidden}, inner, at=at, bias=config.mlp_bias),
        activation=config.activation,
    )


def build(
    config: ModelConfig,
    read: OperatorReader,
    *,
    attention: AttentionBuilder = read_attention,
    mlp: MLPBuilder = read_mlp,
) -> Decoder:
    """Build a decoder of Llama's shape, its attention and MLP read by the given functions."""
    table = read.matrix({"embedding": config.vocab_size}, config.hidden_size)
    hidden = config.hidden_size
    layers = (
        PreNormLayer(
            attention_norm=read.rms_norm("attention_norm", hidden, at=(index,)),
            attention=rotary_by_layer(config, attention(config, read, index)),
            mlp_norm=read.rms_norm("mlp_norm", hidden, at=(index,)),
            mlp=mlp(config, read, index),
        )
        for index in range(config.num_layers)
    )
    return Decoder(
        config,
        embedding=Embedding(table),
        layers=layers,
        norm=read.rms_norm("norm", hidden),
        head=read.head(table, tied=config.tied_embeddings),
        rotary=Rotary(config, device=read.device),
        dtype=read.dtype,
        device=read.device,
    )


def rotary_by_layer(config: ModelConfig, attention: Attention) -> Attention | RotatedBy:
    """Return ``attention``, without rotary positions where its layer has none."""
    return attention if config.rotated is None or config.rotated[attention.index] else RotatedBy(attention, None)


def _halves_of_pairs(rows: Tensor, *, head_dim: int) -> Tensor:
    """Reorder ``rows`` of heads from rotary pairs beside each other to the halves that :class:`Rotary` takes."""
    pairs = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _read_attention(config: ModelConfig, read: OperatorReader, index: int) -> Attention:
    if read.layout == "huggingface":
        return read_attention(config, read, index)
    # GGUF's converter interleaves the two halves of each head of this architecture; take that back.
    halves = partial(_halves_of_pairs, head_dim=config.head_dim)
    return read_attention(config, read, index, arrange={"q": halves, "k": halves})


def _from_gguf(fields: GgufFields) -> ModelConfig:
    return config_from_gguf(fields, implements=frozenset({"expert_count"}), **expert_fields(fields))


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    return config_from_huggingface(raw, "llama")


FAMILY = Family(
    from_huggingface=_from_huggingface,
    from_gguf=_from_gguf,
    stems=STEMS,
    build=partial(build, attention=_read_attention),
)
