"""Llama and what has its shape (SmolLM, Mistral): RMSNorm, rotary positions, grouped heads, SwiGLU.

A flattened forward: all requests' tokens stand as rows of one matrix for every operator but attention. Query, key and
value projections are one matrix product, gate and up projections another; the vocabulary projection runs on the
sampled rows only.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from mlsys_orca.kv_cache import KVCache
from mlsys_orca.loading.checkpoint import Checkpoint, Layout, Progress
from mlsys_orca.loading.weights import WeightReader
from mlsys_orca.models.attention import ragged_attention
from mlsys_orca.models.config import ModelConfig
from mlsys_orca.models.decoder import ForwardInputs
from mlsys_orca.models.layers import Linear, RMSNorm, Rotary, rotate, silu_mul

# What each layout calls the tensors; {} is the layer's number.
_NAMES: dict[Layout, dict[str, str]] = {
    "gguf": {
        "embedding": "token_embd.weight",
        "norm": "output_norm.weight",
        "head": "output.weight",
        "attention_norm": "blk.{}.attn_norm.weight",
        "q": "blk.{}.attn_q.weight",
        "k": "blk.{}.attn_k.weight",
        "v": "blk.{}.attn_v.weight",
        "o": "blk.{}.attn_output.weight",
        "mlp_norm": "blk.{}.ffn_norm.weight",
        "gate": "blk.{}.ffn_gate.weight",
        "up": "blk.{}.ffn_up.weight",
        "down": "blk.{}.ffn_down.weight",
    },
    "huggingface": {
        "embedding": "model.embed_tokens.weight",
        "norm": "model.norm.weight",
        "head": "lm_head.weight",
        "attention_norm": "model.layers.{}.input_layernorm.weight",
        "q": "model.layers.{}.self_attn.q_proj.weight",
        "k": "model.layers.{}.self_attn.k_proj.weight",
        "v": "model.layers.{}.self_attn.v_proj.weight",
        "o": "model.layers.{}.self_attn.o_proj.weight",
        "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
        "gate": "model.layers.{}.mlp.gate_proj.weight",
        "up": "model.layers.{}.mlp.up_proj.weight",
        "down": "model.layers.{}.mlp.down_proj.weight",
    },
}


def _is_ignorable(name: str) -> bool:
    """Tensors that say nothing the configuration has not said: rotary frequencies, and a tied head stored again."""
    return name in ("rope_freqs.weight", "lm_head.weight") or name.endswith("rotary_emb.inv_freq")


class _Weights:
    """Reads a layer's operators from a checkpoint, in the head order this model computes in."""

    def __init__(self, reader: WeightReader, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._reader = reader
        self._config = config
        self._names = _NAMES[reader.checkpoint.layout]
        self._dtype = dtype
        self._device = device

    def norm(self, role: str, *, layer: int = 0) -> RMSNorm:
        """The normalisation with the weight of that role."""
        weight = torch.empty(self._config.hidden_size, dtype=torch.float32, device=self._device)
        self._reader.read_into(self._names[role].format(layer), weight)
        return RMSNorm(weight, eps=self._config.norm_eps, dtype=self._dtype)

    def linear(self, rows: dict[str, int], columns: int, *, layer: int = 0) -> Linear:
        """One product for several projections: roles, one below the other, and how many rows each has."""
        return Linear(self.matrix(rows, columns, layer=layer))

    def matrix(self, rows: dict[str, int], columns: int, *, layer: int = 0) -> Tensor:
        """The matrices of those roles one below the other, [sum of rows, columns]."""
        fused = torch.empty(sum(rows.values()), columns, dtype=self._dtype, device=self._device)
        for role, part in zip(rows, torch.split(fused, list(rows.values())), strict=True):
            self._reader.read_into(self._names[role].format(layer), part)
            if role in ("q", "k") and self._reader.checkpoint.layout == "gguf":
                # GGUF's converters interleave the two halves of each head; take that back (see layers.Rotary).
                pairs = part.view(-1, self._config.head_dim // 2, 2, columns)
                part.copy_(pairs.transpose(1, 2).reshape(part.shape))
        return fused


class LlamaLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig, weights: _Weights, index: int) -> None:
        super().__init__()
        self.config = config
        self.index = index
        hidden, inner = config.hidden_size, config.intermediate_size
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.attention_norm = weights.norm("attention_norm", layer=index)
        self.qkv = weights.linear({"q": q_rows, "k": kv_rows, "v": kv_rows}, hidden, layer=index)
        self.o = weights.linear({"o": hidden}, q_rows, layer=index)
        self.mlp_norm = weights.norm("mlp_norm", layer=index)
        self.gate_up = weights.linear({"gate": inner, "up": inner}, hidden, layer=index)
        self.down = weights.linear({"down": hidden}, inner, layer=index)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], inputs: ForwardInputs, kv_cache: KVCache) -> Tensor:
        """``x`` [num_tokens, hidden_size] fp32 -> the same; writes the layer's keys and values."""
        heads, kv_heads, head_dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        qkv = self.qkv(self.attention_norm(x)).view(-1, heads + 2 * kv_heads, head_dim)
        turned = rotate(qkv[:, : heads + kv_heads], *rotary)
        keys, values = kv_cache.write(self.index, inputs.slots, turned[:, heads:], qkv[:, heads + kv_heads :])
        x = x + self.o(ragged_attention(turned[:, :heads], keys, values, inputs.spans))
        out: Tensor = x + self.down(silu_mul(self.gate_up(self.mlp_norm(x))))
        return out


class LlamaModel(nn.Module):
    """The decoder: a :class:`~mlsys_orca.models.decoder.DecoderModel`. Build it with :meth:`from_checkpoint`.

    In bf16 the sum that runs through the layers stays fp32, which costs little and leaves the last layer's state half
    as wrong (by 0.75 % of its norm instead of 1.5 % on SmolLM2-135M).
    """

    embedding: Tensor

    def __init__(self, config: ModelConfig, weights: _Weights, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.device = device
        self.rotary = Rotary(config, device=device)
        self.register_buffer("embedding", weights.matrix({"embedding": config.vocab_size}, config.hidden_size))
        self.layers = nn.ModuleList(LlamaLayer(config, weights, index) for index in range(config.num_layers))
        self.norm = weights.norm("norm")
        # A tied head is packed anew: no row can be looked up in a packed table, and no product is fast in a plain one.
        tied = config.tied_embeddings
        self.head = Linear(self.embedding) if tied else weights.linear({"head": config.vocab_size}, config.hidden_size)

    @classmethod
    def from_checkpoint(
        cls,
        config: ModelConfig,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
    ) -> Self:
        """Read the weights.

        Args:
            config: The model's shape.
            checkpoint: Where its tensors are; either layout.
            dtype: What to compute in, and to keep weights, keys and values in.
            device: Where.
            progress: Called with bytes read and bytes in all.

        Raises:
            InvalidInputError: a tensor is missing, misshapen or unknown to this architecture.
        """
        reader = WeightReader(checkpoint, progress=progress)
        with torch.inference_mode():
            model = cls(config, _Weights(reader, config, dtype, device), dtype=dtype, device=device)
        reader.finish(_is_ignorable)
        return model

    def forward(self, inputs: ForwardInputs, kv_cache: KVCache) -> Tensor:
        """Run one iteration: writes its keys and values, returns fp32 logits [num_sampled, vocab_size]."""
        x = embedding(inputs.token_ids, self.embedding).float()
        rotary = self.rotary(inputs.positions)
        for layer in self.layers:
            x = layer(x, rotary, inputs, kv_cache)
        if not len(inputs.sampled_rows):  # only chunks of prompts with more to come
            return x.new_empty((0, self.config.vocab_size))
        logits: Tensor = self.head(self.norm(x[inputs.sampled_rows])).float()
        return logits
