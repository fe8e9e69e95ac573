"""Latent attention (DeepSeek-V2, 2024, section 2.1): one compressed key of each token serves all heads.

A head's keys and values are products of a token's latent. Instead of making them for all tokens, the products go to the
other side: a query is brought to the latent's features, and what a head attends to is brought to its values. So the
cache keeps the latent and the rotated part of the key, as one head, and attention is that of many queries to one key.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from mlsys_orca.model.attention import ragged_attention
from mlsys_orca.model.blocks import Attention, Step
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.layers import Linear, RMSNorm, rotate
from torch import Tensor, nn


class LatentAttention(nn.Module):
    """Self-attention of one layer over a cache of latents: heads of rotary_dim + latent features.

    Args:
        config: The model's shape; its one key head has ``head_dim`` features, the first ``rotary_dim`` of them turn.
        index: The layer's number.
        query_down: hidden_size -> query_rank; None: queries are made from the states.
        query_norm: Of what that gives.
        query_plain: -> num_heads * plain_dim, what of the queries does not turn.
        query_rotary: For each head -> rotary_dim.
        key_rotary: hidden_size -> rotary_dim.
        latent: hidden_size -> the latent.
        latent_norm: Of what that gives.
        key_up: For each head, plain_dim -> the latent's features.
        value_up: For each head, the latent -> value_dim.
        output: num_heads * value_dim -> hidden_size.
    """

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        *,
        query_down: Linear | None,
        query_norm: RMSNorm | None,
        query_plain: Linear,
        query_rotary: Iterable[Linear],
        key_rotary: Linear,
        latent: Linear,
        latent_norm: RMSNorm,
        key_up: Iterable[Linear],
        value_up: Iterable[Linear],
        output: Linear,
    ) -> None:
        super().__init__()
        assert config.rotary_dim is not None
        self.core = Attention(config, index, qkv=latent, output=output)  # scores, cache and last product
        self.rotary_dim = config.rotary_dim
        self.query_down, self.query_norm = query_down, query_norm
        self.query_plain, self.query_rotary = query_plain, nn.ModuleList(query_rotary)
        self.key_rotary, self.latent, self.latent_norm = key_rotary, latent, latent_norm
        self.key_up, self.value_up = nn.ModuleList(key_up), nn.ModuleList(value_up)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Attend with normalised ``x`` [num_tokens, hidden_size] -> same shape; write the layer's latents."""
        core, num_heads = self.core, self.core.num_heads
        source = x
        if self.query_down is not None and self.query_norm is not None:
            source = self.query_norm(self.query_down(x).float())
        plain = self.query_plain(source).view(len(x), num_heads, -1)
        queries = torch.stack(
            [
                torch.cat([turned(source), up(plain[:, head])], dim=-1)
                for head, (turned, up) in enumerate(zip(self.query_rotary, self.key_up, strict=True))
            ],
            dim=1,
        )
        value = torch.cat([self.key_rotary(x), self.latent_norm(self.latent(x).float())], dim=-1)[:, None]
        heads = rotate(torch.cat([queries, value], dim=1), *step.rotary)
        slots, spans = step.inputs.slots, step.inputs.spans
        keys, values = step.kv_cache.write(core.index, slots, heads[:, num_heads:], value)
        attended = ragged_attention(heads[:, :num_heads], keys, values, spans, core.options)
        latents = attended.view(len(x), num_heads, -1)[..., self.rotary_dim :]
        found = [up(latents[:, head].contiguous()) for head, up in enumerate(self.value_up)]
        out: Tensor = core.output(torch.cat(found, dim=-1))
        return out


def rows_of(linear: Linear, which: Tensor) -> Linear:
    """Return the product that gives the features ``which`` [n] int64 of those of ``linear``."""
    weight = linear.weight[which] if isinstance(linear.weight, Tensor) else linear.weight.rows(which)
    return Linear(weight, None if linear.bias is None else linear.bias[which])
