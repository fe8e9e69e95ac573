"""Qwen3 (dense): Llama whose query and key heads are normalised before they turn, with heads of any width."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from mlsys_orca.model import assembly
from mlsys_orca.model.blocks import Attention
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.config_readers import GgufFields, config_from_gguf, config_from_huggingface
from mlsys_orca.model.families import llama, qwen2
from mlsys_orca.model.family import Family, Stems
from mlsys_orca.model.latent import rows_of
from mlsys_orca.model.layers import Linear, RMSNorm
from mlsys_orca.model.operator_reader import OperatorReader
from mlsys_orca.model.recurrent import GatedAttention

STEMS: Stems = {
    "gguf": {**llama.STEMS["gguf"], "q_norm": "blk.{}.attn_q_norm", "k_norm": "blk.{}.attn_k_norm"},
    "huggingface": {
        **llama.STEMS["huggingface"],
        "q_norm": "model.layers.{}.self_attn.q_norm",
        "k_norm": "model.layers.{}.self_attn.k_norm",
    },
}
DEFAULTS = {"head_dim": 128, **qwen2.DEFAULTS}


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    raw = DEFAULTS | dict(raw)
    return config_from_huggingface(raw, "qwen3", windows=qwen2.windows(raw))


def _from_gguf(fields: GgufFields) -> ModelConfig:
    return config_from_gguf(fields)


def read_attention(config: ModelConfig, read: OperatorReader, index: int, *, one_plus: bool = False) -> Attention:
    """Read attention of layer ``index``; ``one_plus`` where the file has its norms' weights less one."""
    return assembly.read_attention(config, read, index, qk_norm=_head_norms(config, read, index, one_plus=one_plus))


def read_gated_attention(config: ModelConfig, read: OperatorReader, index: int, *, kv_index: int) -> GatedAttention:
    """Read attention of layer ``index`` whose queries have gates beside them, head by head (Qwen3-Next).

    Directories have its norms' weights less one. ``kv_index``: its number among the layers that keep keys and values.
    """
    at, size, heads, num_keys = (index,), config.head_dim, config.num_heads, config.num_kv_heads * config.head_dim
    counts = {"q": 2 * heads * size, "k": num_keys, "v": num_keys}
    rows = torch.arange(sum(counts.values()))
    queries, gates = rows[: counts["q"]].view(heads, 2, size).unbind(1)
    order = torch.cat([queries.flatten(), rows[counts["q"] :], gates.flatten()])
    return GatedAttention(
        Attention(
            config,
            kv_index,
            qkv=rows_of(Linear(read.matrix(counts, config.hidden_size, at=at)), order),
            output=read.linear({"o": config.hidden_size}, heads * size, at=at),
            qk_norm=_head_norms(config, read, index, one_plus=read.layout == "huggingface"),
        )
    )


def _head_norms(config: ModelConfig, read: OperatorReader, index: int, *, one_plus: bool) -> RMSNorm:
    heads = {"q_norm": config.num_heads, "k_norm": config.num_kv_heads}
    weights = [
        read.tensor(role, (config.head_dim,), at=(index,), dtype=torch.float32).expand(count, -1)
        for role, count in heads.items()
    ]
    return RMSNorm(torch.cat(weights) + one_plus, eps=config.norm_eps, dtype=read.dtype)


FAMILY = Family(
    from_huggingface=_from_huggingface,
    from_gguf=_from_gguf,
    stems=STEMS,
    build=partial(assembly.build, attention=read_attention),
)
