"""OPT (Zhang et al., 2022): learned positions from row 2, LayerNorm before each branch or, in OPT-350m, after each sum.

OPT-350m also has a narrow embedding table, projected to the hidden size and back. GGUF has no layout for the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from mlsys_orca.model.assembly import read_attention, read_plain_mlp
from mlsys_orca.model.blocks import Cast, Decoder, PostNormLayer, PreNormLayer
from mlsys_orca.model.config import ModelConfig, activation_name
from mlsys_orca.model.config_readers import refuse_common, require
from mlsys_orca.model.family import Family
from mlsys_orca.model.layers import Embedding
from mlsys_orca.model.operator_reader import OperatorReader
from torch import nn

_POSITION_OFFSET = 2  # rows of the position table before that of position 0
_STEMS = {
    "embedding": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "project_in": "model.decoder.project_in",
    "project_out": "model.decoder.project_out",
    "norm": "model.decoder.final_layer_norm",
    "head": "lm_head",
    "attention_norm": "model.decoder.layers.{}.self_attn_layer_norm",
    "q": "model.decoder.layers.{}.self_attn.q_proj",
    "k": "model.decoder.layers.{}.self_attn.k_proj",
    "v": "model.decoder.layers.{}.self_attn.v_proj",
    "o": "model.decoder.layers.{}.self_attn.out_proj",
    "mlp_norm": "model.decoder.layers.{}.final_layer_norm",
    "up": "model.decoder.layers.{}.fc1",
    "down": "model.decoder.layers.{}.fc2",
}


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    require(raw, "hidden_size", "ffn_dim", "num_hidden_layers", "num_attention_heads", "vocab_size")
    refuse_common(raw)
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    width = raw.get("word_embed_proj_dim") or hidden
    biased, pre_norm = bool(raw.get("enable_bias", True)), bool(raw.get("do_layer_norm_before", True))
    return ModelConfig(
        architecture="opt",
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        intermediate_size=raw["ffn_dim"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_positions=raw.get("max_position_embeddings", 2048),
        norm_eps=1e-5,
        norm_affine=bool(raw.get("layer_norm_elementwise_affine", True)),
        activation=activation_name(raw.get("activation_function", "relu")),
        tied_embeddings=bool(raw.get("tie_word_embeddings", True)),
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=biased,
        post_norm=not pre_norm,
        final_norm=pre_norm and not raw.get("_remove_final_layer_norm", False),
        embedding_size=width if width != hidden else None,
    )


def _layer(config: ModelConfig, read: OperatorReader, index: int) -> nn.Module:
    layer = partial(PostNormLayer, dtype=read.dtype) if config.post_norm else PreNormLayer

    def norm(role: str) -> nn.Module:
        dtype = torch.float32 if config.post_norm else read.dtype
        return read.layer_norm(role, config.hidden_size, at=(index,), affine=config.norm_affine, dtype=dtype)

    return layer(
        attention_norm=norm("attention_norm"),
        attention=read_attention(config, read, index),
        mlp_norm=norm("mlp_norm"),
        mlp=read_plain_mlp(config, read, index),
    )


def _build(config: ModelConfig, read: OperatorReader) -> Decoder:
    hidden, width = config.hidden_size, config.embedding_size or config.hidden_size
    table = read.matrix({"embedding": config.vocab_size}, width)
    positions = read.tensor("positions", (config.max_positions + _POSITION_OFFSET, hidden))
    project_in = read.linear({"project_in": hidden}, width) if width != hidden else None
    head: nn.Module = read.head(table, tied=config.tied_embeddings)
    if width != hidden:
        head = nn.Sequential(read.linear({"project_out": width}, hidden), head)
    return Decoder(
        config,
        embedding=Embedding(table, project=project_in, positions=positions, offset=_POSITION_OFFSET),
        layers=(_layer(config, read, index) for index in range(config.num_layers)),
        norm=read.layer_norm("norm", hidden, affine=config.norm_affine) if config.final_norm else Cast(read.dtype),
        head=head,
        rotary=None,
        dtype=read.dtype,
        device=read.device,
    )


FAMILY = Family(from_huggingface=_from_huggingface, from_gguf=None, stems={"huggingface": _STEMS}, build=_build)
