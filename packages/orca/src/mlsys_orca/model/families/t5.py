"""T5 and what has its shape (T5 1.1, Flan-T5, mT5, UMT5): an encoder-decoder with relative positions.

RMSNorm, no biases, scores without a scale. Self-attention's scores gain a number by head and distance: of one table of
the encoder and one of the decoder, in the first layer of each (UMT5: in every layer). Cross-attention has none. In the
first T5 the head is the embedding table, and what enters it is scaled by ``d_model ** -0.5``; the later ones have a
head of their own and a gate in the MLP. Which of the two a file has, its tensors say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from mlsys_orca.model.attention import AttentionOptions
from mlsys_orca.model.blocks import MLP, Decoder, GatedMLP, PreNormLayer
from mlsys_orca.model.config import EncoderPart, ModelConfig, RelativePositions, activation_name, refuse
from mlsys_orca.model.config_readers import GgufFields, config_from_gguf, refuse_common, require
from mlsys_orca.model.embedding import Embedding
from mlsys_orca.model.encoder_decoder import (
    CrossAttention,
    CrossLayer,
    Encoder,
    EncoderDecoder,
    RowAttention,
    SelfAttention,
)
from mlsys_orca.model.family import Family, Stems
from mlsys_orca.model.layers import Linear
from mlsys_orca.model.operator_reader import OperatorReader
from torch import Tensor, nn

_GGUF = {
    "embedding": "token_embd",
    "head": "output",
    "encoder.norm": "enc.output_norm",
    "encoder.attention_norm": "enc.blk.{}.attn_norm",
    "encoder.q": "enc.blk.{}.attn_q",
    "encoder.k": "enc.blk.{}.attn_k",
    "encoder.v": "enc.blk.{}.attn_v",
    "encoder.o": "enc.blk.{}.attn_o",
    "encoder.positions": "enc.blk.{}.attn_rel_b",
    "encoder.mlp_norm": "enc.blk.{}.ffn_norm",
    "encoder.gate": "enc.blk.{}.ffn_gate",
    "encoder.gated": "enc.blk.{}.ffn_up",
    "encoder.up": "enc.blk.{}.ffn_up",
    "encoder.down": "enc.blk.{}.ffn_down",
    "decoder.norm": "dec.output_norm",
    "decoder.attention_norm": "dec.blk.{}.attn_norm",
    "decoder.q": "dec.blk.{}.attn_q",
    "decoder.k": "dec.blk.{}.attn_k",
    "decoder.v": "dec.blk.{}.attn_v",
    "decoder.o": "dec.blk.{}.attn_o",
    "decoder.positions": "dec.blk.{}.attn_rel_b",
    "cross.attention_norm": "dec.blk.{}.cross_attn_norm",
    "cross.q": "dec.blk.{}.cross_attn_q",
    "cross.k": "dec.blk.{}.cross_attn_k",
    "cross.v": "dec.blk.{}.cross_attn_v",
    "cross.o": "dec.blk.{}.cross_attn_o",
    "decoder.mlp_norm": "dec.blk.{}.ffn_norm",
    "decoder.gate": "dec.blk.{}.ffn_gate",
    "decoder.gated": "dec.blk.{}.ffn_up",
    "decoder.up": "dec.blk.{}.ffn_up",
    "decoder.down": "dec.blk.{}.ffn_down",
}
_HUGGINGFACE = {
    "embedding": "shared",
    "encoder.embedding": "encoder.embed_tokens",  # some files have the table under this name only
    "head": "lm_head",
    "encoder.norm": "encoder.final_layer_norm",
    "encoder.attention_norm": "encoder.block.{}.layer.0.layer_norm",
    "encoder.q": "encoder.block.{}.layer.0.SelfAttention.q",
    "encoder.k": "encoder.block.{}.layer.0.SelfAttention.k",
    "encoder.v": "encoder.block.{}.layer.0.SelfAttention.v",
    "encoder.o": "encoder.block.{}.layer.0.SelfAttention.o",
    "encoder.positions": "encoder.block.{}.layer.0.SelfAttention.relative_attention_bias",
    "encoder.mlp_norm": "encoder.block.{}.layer.1.layer_norm",
    "encoder.gate": "encoder.block.{}.layer.1.DenseReluDense.wi_0",
    "encoder.gated": "encoder.block.{}.layer.1.DenseReluDense.wi_1",
    "encoder.up": "encoder.block.{}.layer.1.DenseReluDense.wi",
    "encoder.down": "encoder.block.{}.layer.1.DenseReluDense.wo",
    "decoder.norm": "decoder.final_layer_norm",
    "decoder.attention_norm": "decoder.block.{}.layer.0.layer_norm",
    "decoder.q": "decoder.block.{}.layer.0.SelfAttention.q",
    "decoder.k": "decoder.block.{}.layer.0.SelfAttention.k",
    "decoder.v": "decoder.block.{}.layer.0.SelfAttention.v",
    "decoder.o": "decoder.block.{}.layer.0.SelfAttention.o",
    "decoder.positions": "decoder.block.{}.layer.0.SelfAttention.relative_attention_bias",
    "cross.attention_norm": "decoder.block.{}.layer.1.layer_norm",
    "cross.q": "decoder.block.{}.layer.1.EncDecAttention.q",
    "cross.k": "decoder.block.{}.layer.1.EncDecAttention.k",
    "cross.v": "decoder.block.{}.layer.1.EncDecAttention.v",
    "cross.o": "decoder.block.{}.layer.1.EncDecAttention.o",
    "decoder.mlp_norm": "decoder.block.{}.layer.2.layer_norm",
    "decoder.gate": "decoder.block.{}.layer.2.DenseReluDense.wi_0",
    "decoder.gated": "decoder.block.{}.layer.2.DenseReluDense.wi_1",
    "decoder.up": "decoder.block.{}.layer.2.DenseReluDense.wi",
    "decoder.down": "decoder.block.{}.layer.2.DenseReluDense.wo",
}
_STEMS: Stems = {"gguf": _GGUF, "huggingface": _HUGGINGFACE}
_GGUF_MAX_DISTANCE = 128  # what its format takes for granted


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    require(raw, "d_model", "d_kv", "d_ff", "num_layers", "num_heads", "vocab_size", "relative_attention_num_buckets")
    refuse_common(raw)
    refuse(not raw.get("is_encoder_decoder", True), "an encoder without its decoder")
    refuse(raw.get("forced_eos_token_id") is not None, "a forced last token (forced_eos_token_id)")
    architecture, heads, hidden = raw["model_type"], raw["num_heads"], raw["d_model"]
    activation = str(raw.get("feed_forward_proj") or ("relu" if architecture == "t5" else "gated-gelu"))
    start = raw.get("decoder_start_token_id")
    starts = ((raw.get("pad_token_id") or 0) if start is None else start, raw.get("forced_bos_token_id"))
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        intermediate_size=raw["d_ff"],
        num_layers=raw.get("num_decoder_layers") or raw["num_layers"],
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=raw["d_kv"],
        max_positions=2 * raw.get("n_positions", 512),  # as many to read as to write; nothing in the model counts them
        norm_eps=raw.get("layer_norm_epsilon", 1e-6),
        # In T5's own files a gated GELU is the one with tanh.
        activation="gelu_tanh" if activation == "gated-gelu" else activation_name(activation.removeprefix("gated-")),
        attention_scale=1.0,
        logit_scale=hidden**-0.5 if _scales_states(raw) else 1.0,
        relative_positions=RelativePositions(
            num_buckets=raw["relative_attention_num_buckets"],
            max_distance=raw.get("relative_attention_max_distance", 128),
            by_layer=architecture == "umt5",
        ),
        encoder=EncoderPart(
            num_layers=raw["num_layers"], start_token_ids=tuple(token_id for token_id in starts if token_id is not None)
        ),
    )


def _scales_states(raw: Mapping[str, Any]) -> bool:
    """Return whether the states are scaled before the head: so if that was tied when the model was trained.

    transformers 5 writes a tied head into every file, and T5's answer beside it. Its mT5 was never scaled.
    """
    if raw["model_type"] == "mt5":
        return False
    return bool(raw.get("scale_decoder_outputs", raw.get("tie_word_embeddings", True)))


def _from_gguf(fields: GgufFields) -> ModelConfig:
    num_layers, hidden = fields.get("block_count"), fields.get("embedding_length")
    is_tied, is_gated = "output.weight" not in fields.tensor_names, "dec.blk.0.ffn_gate.weight" in fields.tensor_names
    return config_from_gguf(
        fields,
        num_layers=fields.get("decoder_block_count", num_layers),
        max_positions=2 * fields.get("context_length"),
        activation="gelu_tanh" if is_gated else "relu",
        attention_scale=1.0,
        logit_scale=hidden**-0.5 if is_tied else 1.0,
        relative_positions=RelativePositions(
            num_buckets=fields.get("attention.relative_buckets_count"),
            max_distance=_GGUF_MAX_DISTANCE,
            by_layer="dec.blk.1.attn_rel_b.weight" in fields.tensor_names,
        ),
        encoder=EncoderPart(num_layers=num_layers, start_token_ids=(fields.get("decoder_start_token_id", 0),)),
    )


class _Reader:
    """Reader of one side's operators, their roles named with the side's name before a dot."""

    def __init__(self, config: ModelConfig, read: OperatorReader, side: str) -> None:
        self._config = config
        self._read = read
        self._side = side
        self._positions: Tensor | None = None

    def norm(self, role: str, at: tuple[int, ...] = ()) -> nn.Module:
        return self._read.rms_norm(f"{self._side}.{role}", self._config.hidden_size, at=at)

    def project(self, roles: str, index: int) -> Linear:
        rows = {f"{self._side}.{role}": self._config.num_heads * self._config.head_dim for role in roles}
        return self._read.linear(rows, self._config.hidden_size, at=(index,))

    def output(self, index: int) -> Linear:
        config = self._config
        rows = {f"{self._side}.o": config.hidden_size}
        return self._read.linear(rows, config.num_heads * config.head_dim, at=(index,))

    def options(self, index: int, *, is_causal: bool) -> AttentionOptions:
        """Return options of self-attention; the first layer's table serves the others too, unless each has its own."""
        positions = self._config.relative_positions
        assert positions is not None
        if index == 0 or positions.by_layer:
            shape = (positions.num_buckets, self._config.num_heads)
            table = self._read.tensor(f"{self._side}.positions", shape, at=(index,), dtype=torch.float32)
            self._positions = bias_by_distance(table, positions, is_causal=is_causal)
        return AttentionOptions(scale=self._config.attention_scale, is_causal=is_causal, bias=self._positions)

    def mlp(self, index: int) -> nn.Module:
        hidden, inner, at = self._config.hidden_size, self._config.intermediate_size, (index,)
        gate, gated, up, down = (f"{self._side}.{role}" for role in ("gate", "gated", "up", "down"))
        out = partial(self._read.linear, {down: hidden}, inner, at=at)
        if self._read.has(gate, at=at):
            gates = self._read.linear({gate: inner, gated: inner}, hidden, at=at)
            return GatedMLP(gates, out(), activation=self._config.activation)
        return MLP(self._read.linear({up: inner}, hidden, at=at), out(), activation=self._config.activation)


def _encoder_layer(config: ModelConfig, side: _Reader, index: int) -> PreNormLayer:
    options = side.options(index, is_causal=False)
    return PreNormLayer(
        attention_norm=side.norm("attention_norm", (index,)),
        attention=RowAttention(
            qkv=side.project("qkv", index), output=side.output(index), num_heads=config.num_heads, options=options
        ),
        mlp_norm=side.norm("mlp_norm", (index,)),
        mlp=side.mlp(index),
    )


def _decoder_layer(config: ModelConfig, own: _Reader, cross: _Reader, index: int) -> CrossLayer:
    return CrossLayer(
        attention_norm=own.norm("attention_norm", (index,)),
        attention=SelfAttention(
            index,
            qkv=own.project("qkv", index),
            output=own.output(index),
            num_heads=config.num_heads,
            options=own.options(index, is_causal=True),
        ),
        cross_norm=cross.norm("attention_norm", (index,)),
        cross_attention=CrossAttention(
            index,
            query=cross.project("q", index),
            key_value=cross.project("kv", index),
            output=cross.output(index),
            num_heads=config.num_heads,
            options=AttentionOptions(scale=config.attention_scale, is_causal=False),
        ),
        mlp_norm=own.norm("mlp_norm", (index,)),
        mlp=own.mlp(index),
    )


def _build(config: ModelConfig, read: OperatorReader) -> EncoderDecoder:
    assert config.encoder is not None
    role = "embedding" if read.layout == "gguf" or read.has("embedding") else "encoder.embedding"
    table = read.matrix({role: config.vocab_size}, config.hidden_size)
    embedding = Embedding(table)
    encoder, decoder, cross = (_Reader(config, read, side) for side in ("encoder", "decoder", "cross"))
    return EncoderDecoder(
        Encoder(
            embedding=embedding,
            layers=(_encoder_layer(config, encoder, index) for index in range(config.encoder.num_layers)),
            last_norm=encoder.norm("norm"),
        ),
        Decoder(
            config,
            embedding=embedding,
            layers=(_decoder_layer(config, decoder, cross, index) for index in range(config.num_layers)),
            norm=decoder.norm("norm"),
            head=read.head(table, tied=not read.has("head")),
            rotary=None,
            dtype=read.dtype,
            device=read.device,
        ),
    )


FAMILY = Family(
    from_huggingface=_from_huggingface,
    from_gguf=_from_gguf,
    stems=_STEMS,
    build=_build,
    # The table stored again, and tables of cross-attention, which old files have and nothing reads.
    ignorable_suffixes=(
        "coder.embed_tokens.weight",
        "EncDecAttention.relative_attention_bias.weight",
        "cross_attn_rel_b.weight",
    ),
)


def bias_by_distance(table: Tensor, positions: RelativePositions, *, is_causal: bool) -> Tensor:
    """Return the bias of each head's scores, by distance.

    Args:
        table: [num_buckets, num_heads], as it was learned.
        positions: Rule by which distances fall into buckets.
        is_causal: True if keys lie on one side of a row only, which has all buckets then.

    Returns:
        fp32 [num_heads, 2 * max_distance + 1], by the key's position less the row's, from ``-max_distance`` on.

    Example:
        >>> table = torch.arange(8.0)[:, None]
        >>> bias_by_distance(table, RelativePositions(num_buckets=8, max_distance=5), is_causal=True)[0].int().tolist()
        [7, 4, 3, 2, 1, 0, 0, 0, 0, 0, 0]
        >>> bias_by_distance(table, RelativePositions(num_buckets=8, max_distance=5), is_causal=False)[0].int().tolist()
        [3, 3, 2, 2, 1, 0, 5, 6, 6, 7, 7]
    """
    reach = positions.max_distance
    distances = torch.arange(-reach, reach + 1)
    num_buckets = positions.num_buckets if is_causal else positions.num_buckets // 2  # on the row's one side, or each
    lengths = (-distances).clamp(min=0) if is_causal else distances.abs()
    buckets = _buckets(lengths, num_buckets, reach)
    if not is_causal:
        buckets += num_buckets * (distances > 0)
    return table.float()[buckets.to(table.device)].T.contiguous()


def _buckets(lengths: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each length: half hold one length each, the others stretches on a logarithmic scale."""
    num_exact = num_buckets // 2
    # In fp32 and in this order, as the models were trained: another rounding moves a stretch's end by one.
    stretches = torch.log(lengths.clamp(min=1).float() / num_exact) / math.log(max_distance / num_exact)
    wide = num_exact + (stretches * (num_buckets - num_exact)).long()
    return torch.where(lengths < num_exact, lengths, wide.clamp(max=num_buckets - 1))
