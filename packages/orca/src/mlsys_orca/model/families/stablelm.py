"""StableLM (Stability AI, 2023): Llama with LayerNorm and positions on part of a head.

Some models' branches are parallel, behind one norm, and some normalise each query and key head.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from mlsys_orca.model import assembly
from mlsys_orca.model.blocks import Attention
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.config_readers import GgufFields, config_from_gguf, config_from_huggingface
from mlsys_orca.model.families import llama
from mlsys_orca.model.family import Family, Stems
from mlsys_orca.model.layers import LayerNorm
from mlsys_orca.model.operator_reader import OperatorReader
from torch import Tensor

_STEMS: Stems = {
    "gguf": {**llama.STEMS["gguf"], "q_norms": "blk.{}.attn_q_norm", "k_norms": "blk.{}.attn_k_norm"},
    "huggingface": {
        **llama.STEMS["huggingface"],
        "q_head_norm": "model.layers.{}.self_attn.q_layernorm.norms.{}",
        "k_head_norm": "model.layers.{}.self_attn.k_layernorm.norms.{}",
    },
}


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    older = {"partial_rotary_factor": raw.get("rope_pct", 0.25), "max_position_embeddings": 4096}
    return config_from_huggingface(
        older | dict(raw),
        "stablelm",
        partial_rotary=True,
        norm_eps=raw.get("layer_norm_eps", 1e-5),
        parallel_residual=bool(raw.get("use_parallel_residual", False)),
        qk_norm=bool(raw.get("qk_layernorm", False)),
        qkv_bias=bool(raw.get("use_qkv_bias", False)),
        output_bias=False,
        mlp_bias=False,
    )


def _from_gguf(fields: GgufFields) -> ModelConfig:
    return config_from_gguf(
        fields,
        norm="layer",
        partial_rotary=True,
        parallel_residual="blk.0.ffn_norm.weight" not in fields.tensor_names,
        qk_norm="blk.0.attn_q_norm.weight" in fields.tensor_names,
    )


def _attention(config: ModelConfig, read: OperatorReader, index: int) -> Attention:
    def weights(which: str, heads: int) -> Tensor:
        if read.layout == "gguf":
            return read.tensor(f"{which}_norms", (heads, config.head_dim), at=(index,), dtype=torch.float32)
        return torch.stack(
            [
                read.tensor(f"{which}_head_norm", (config.head_dim,), at=(index, head), dtype=torch.float32)
                for head in range(heads)
            ]
        )

    norm = None
    if config.qk_norm:
        scales = torch.cat([weights("q", config.num_heads), weights("k", config.num_kv_heads)])
        norm = LayerNorm(scales, None, hidden_size=config.head_dim, eps=config.norm_eps, dtype=read.dtype)
    return assembly.read_attention(config, read, index, qk_norm=norm)


FAMILY = Family(
    from_huggingface=_from_huggingface,
    from_gguf=_from_gguf,
    stems=_STEMS,
    build=partial(assembly.build, attention=_attention, norm=OperatorReader.layer_norm),
)
