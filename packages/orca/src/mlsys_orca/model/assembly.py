"""Decoders of Llama's shape, put together from parts that a family may read in its own way.

Between the families, which say what differs, and :mod:`.blocks`, which has the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mlsys_orca.model.blocks import (
    MLP,
    Attention,
    Cast,
    Decoder,
    GatedMLP,
    ParallelLayer,
    PreNormLayer,
    RotatedBy,
    SandwichLayer,
)
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.embedding import Embedding
from mlsys_orca.model.layers import Rotaries, Rotary, halves_of_pairs
from mlsys_orca.model.operator_reader import Arrange, OperatorReader
from torch import Tensor, nn

AttentionBuilder = Callable[[ModelConfig, OperatorReader, int], nn.Module]
LayerBuilder = Callable[[ModelConfig, OperatorReader, int], nn.Module]
MLPBuilder = Callable[[ModelConfig, OperatorReader, int], nn.Module]
NormReader = Callable[..., nn.Module]  # (reader, role, size, at=...)


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


def read_joined_attention(
    config: ModelConfig, read: OperatorReader, index: int, *, transposed: bool = False
) -> Attention:
    """Read attention of layer ``index``, query, key and value from one matrix; see :meth:`OperatorReader.linear`."""
    q_rows, hidden, at = config.num_heads * config.head_dim, config.hidden_size, (index,)
    rows = {"qkv": q_rows + 2 * config.num_kv_heads * config.head_dim}
    return Attention(
        config,
        index,
        qkv=read.linear(rows, hidden, at=at, bias=config.qkv_bias, transposed=transposed),
        output=read.linear({"o": hidden}, q_rows, at=at, bias=config.output_bias, transposed=transposed),
    )


def read_mlp(config: ModelConfig, read: OperatorReader, index: int) -> nn.Module:
    """Read the MLP of layer ``index`` from separate gate and up projections, or its experts."""
    if config.num_experts:
        from mlsys_orca.model.experts import read_experts

        return read_experts(config, read, index)
    hidden, inner, at = config.hidden_size, config.intermediate_size, (index,)
    return GatedMLP(
        read.linear({"gate": inner, "up": inner}, hidden, at=at, bias=config.mlp_bias),
        read.linear({"down": hidden}, inner, at=at, bias=config.mlp_bias),
        activation=config.activation,
    )


def read_plain_mlp(config: ModelConfig, read: OperatorReader, index: int, *, transposed: bool = False) -> nn.Module:
    """Read the MLP of layer ``index``, which has no gate."""
    hidden, inner, at = config.hidden_size, config.intermediate_size, (index,)
    return MLP(
        read.linear({"up": inner}, hidden, at=at, bias=config.mlp_bias, transposed=transposed),
        read.linear({"down": hidden}, inner, at=at, bias=config.mlp_bias, transposed=transposed),
        activation=config.activation,
    )


def read_layer(
    config: ModelConfig,
    read: OperatorReader,
    index: int,
    *,
    attention: AttentionBuilder = read_attention,
    mlp: MLPBuilder = read_mlp,
    norm: NormReader = OperatorReader.rms_norm,
) -> nn.Module:
    """Read layer ``index``: one branch after the other, or parallel ones behind one norm."""
    first = norm(read, "attention_norm", config.hidden_size, at=(index,))
    second = first if config.parallel_residual else norm(read, "mlp_norm", config.hidden_size, at=(index,))
    layer = ParallelLayer if config.parallel_residual else PreNormLayer
    return layer(
        attention_norm=first,
        attention=rotary_by_layer(config, attention(config, read, index)),
        mlp_norm=second,
        mlp=mlp(config, read, index),
    )


def read_sandwich_layer(
    config: ModelConfig,
    read: OperatorReader,
    index: int,
    *,
    attention: AttentionBuilder = read_attention,
    mlp: MLPBuilder = read_mlp,
    norm: NormReader = OperatorReader.rms_norm,
    norms_inputs: bool = True,
) -> SandwichLayer:
    """Read layer ``index``, which normalises what its branches give; ``norms_inputs``: also what they read."""

    def read_norm(role: str) -> nn.Module:
        return norm(read, role, config.hidden_size, at=(index,))

    return SandwichLayer(
        attention_norm=read_norm("attention_norm") if norms_inputs else Cast(read.dtype),
        attention=attention(config, read, index),
        attention_out_norm=read_norm("attention_out_norm"),
        mlp_norm=read_norm("mlp_norm") if norms_inputs else Cast(read.dtype),
        mlp=mlp(config, read, index),
        mlp_out_norm=read_norm("mlp_out_norm"),
    )


def build(
    config: ModelConfig,
    read: OperatorReader,
    *,
    norm: NormReader = OperatorReader.rms_norm,
    layer: LayerBuilder | None = None,
    positions: Tensor | None = None,
    rotary: Rotary | Rotaries | None = None,
    **parts: Any,
) -> Decoder:
    """Build a decoder of Llama's shape.

    Args:
        config: The model's shape.
        read: Reads its tensors.
        norm: Reads a norm.
        layer: Reads a layer; None: :func:`read_layer`.
        positions: [max_positions, hidden_size], learned; None: they turn the heads.
        rotary: Turns the heads; None: by the configuration.
        parts: Further arguments of :func:`read_layer`.
    """
    table = read.matrix({"embedding": config.vocab_size}, config.hidden_size)
    read_one: LayerBuilder = layer or partial(read_layer, norm=norm, **parts)
    if rotary is None and positions is None:
        rotary = Rotary(config, device=read.device)
    return Decoder(
        config,
        embedding=Embedding(table, scale=config.embedding_scale, positions=positions),
        layers=(read_one(config, read, index) for index in range(config.num_layers)),
        norm=norm(read, "norm", config.hidden_size),
        head=read.head(table, tied=config.tied_embeddings),
        rotary=rotary,
        dtype=read.dtype,
        device=read.device,
    )


def rotary_by_layer(config: ModelConfig, attention: nn.Module) -> nn.Module:
    """Return ``attention``, without rotary positions where its layer has none."""
    if not isinstance(attention, Attention) or config.rotated is None or config.rotated[attention.index]:
        return attention
    return RotatedBy(attention, None)


def read_attention_of_pairs(config: ModelConfig, read: OperatorReader, index: int, **parts: Any) -> Attention:
    """Read attention of layer ``index`` from heads whose rotary pairs stand beside each other."""
    halves = partial(halves_of_pairs, head_dim=config.head_dim, rotary_dim=config.rotary_dim)
    return read_attention(config, read, index, arrange={"q": halves, "k": halves}, **parts)
