"""Layers of encoders: attention within each request, padded or packed, with learned, relative or rotary positions.

Our own: transformers' layers take padded rows only, and Orca's are built on its own kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from mlsys_encoders.models.config import BertConfig, HeadConfig

_MAX_DISTANCE = 128  # largest relative position told apart; no configuration states another

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "identity": lambda x: x,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True, slots=True)
class Places:
    """Positions of a batch's tokens, for all layers of one stage."""

    positions: Tensor  # int64, [tokens] of packed rows or of a padded one
    rotations: dict[float, tuple[Tensor, Tensor]]  # theta -> cosine and sine, [tokens, head features]
    bias: Tensor | None  # bias of relative positions, [heads, longest, longest]

    def mask(self, length: int, reach: int | None) -> Tensor | None:
        """Return what is added to the scores of a request of ``length`` tokens, or who is seen; None: nothing.

        [heads, length, length] floats, or [1, length, length] booleans.
        """
        if self.bias is not None:
            return self.bias[:, :length, :length]
        if reach is None or length <= reach + 1:
            return None
        at = torch.arange(length, device=self.positions.device)
        return ((at[:, None] - at).abs() <= reach)[None]


def rotations(thetas: Sequence[float], positions: Tensor, size: int) -> dict[float, tuple[Tensor, Tensor]]:
    """Return the cosines and sines of rotary positions (Su et al., 2021), by theta: each fp32 [tokens, size]."""
    found = {}
    for theta in set(thetas):
        steps = 1.0 / theta ** (torch.arange(0, size, 2, device=positions.device).float() / size)
        angles = positions[:, None].float() * steps
        angles = torch.cat([angles, angles], -1)
        found[theta] = angles.cos(), angles.sin()
    return found


def bias_of(table: Tensor, length: int) -> Tensor:
    """Return the bias of T5's relative positions (Raffel et al., 2020), [heads, length, length].

    Args:
        table: Learned numbers, [buckets, heads].
        length: Tokens of the longest request.
    """
    at = torch.arange(length, device=table.device)
    away = at[:, None] - at  # query less key
    num = len(table) // 2
    exact = num // 2
    # In fp32 and in this order, as the models were trained: another rounding moves a bucket's end by one.
    wide = torch.log(away.abs().clamp(min=1).float() / exact) / math.log(_MAX_DISTANCE / exact) * (num - exact)
    bucket = torch.where(away.abs() < exact, away.abs(), (exact + wide.long()).clamp(max=num - 1))
    return table[bucket + num * (away < 0)].permute(2, 0, 1)


def norm_of(config: BertConfig) -> nn.LayerNorm:
    """Return a LayerNorm of the encoder's width."""
    return nn.LayerNorm(config.hidden_size, config.layer_norm_eps, bias=config.has_norm_bias)


class Layer(nn.Module):
    """One encoder layer: attention and MLP, each with its sum and norm.

    Args:
        config: Shape.
        number: Layer number, from 0.
    """

    def __init__(self, config: BertConfig, number: int) -> None:
        super().__init__()
        size, inner, bias = config.hidden_size, config.intermediate_size, config.has_attention_bias
        self.num_heads = config.num_heads
        self.is_pre_norm = config.is_pre_norm
        self.is_gated = config.is_gated
        self.theta = config.thetas[number] if config.thetas else None
        self.reach = config.reaches[number] if config.reaches else None
        self.activation = ACTIVATIONS[config.activation]
        self.query_key_value = nn.Linear(size, 3 * size, bias=bias)
        self.attention_output = nn.Linear(size, size, bias=bias)
        # ModernBERT's first layer takes the embeddings as they are, which have a norm of their own.
        self.attention_norm = nn.Identity() if config.is_pre_norm and number == 0 else norm_of(config)
        self.up = nn.Linear(size, inner * (2 if config.is_gated else 1), bias=config.has_mlp_bias)
        self.down = nn.Linear(inner, size, bias=config.has_mlp_bias)
        self.output_norm = norm_of(config)

    def forward(self, hidden: Tensor, seen: Tensor | None, places: Places) -> Tensor:
        """Run the layer on ``hidden`` [requests, tokens, features].

        ``seen`` is [requests, 1, 1, tokens], True where there is a token; None: everywhere.
        """
        num, length, size = hidden.shape
        query, key, value = self._heads(hidden, places)  # [requests, tokens, heads, features]
        mask = places.mask(length, self.reach)
        if mask is None:
            mask = seen
        elif seen is not None:
            is_bias = mask.is_floating_point()
            mask = mask.masked_fill(~seen, -torch.inf) if is_bias else mask & seen
            # A row of padding that sees nobody would be NaN; nobody looks at it.
            mask = mask if is_bias else mask | torch.eye(length, dtype=torch.bool, device=hidden.device)
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask
        )
        return self._rest(hidden, mixed.transpose(1, 2).reshape(num, length, size))

    def forward_packed(self, hidden: Tensor, lengths: Sequence[int], places: Places) -> Tensor:
        """Run the layer on ``hidden`` [tokens of all requests, features]; attention stays within each request."""
        parts = [torch.split(part.transpose(0, 1), list(lengths), 1) for part in self._heads(hidden, places)]
        mixed = [
            functional.scaled_dot_product_attention(
                query[None], key[None], value[None], attn_mask=places.mask(length, self.reach)
            )[0]
            for length, query, key, value in zip(lengths, *parts, strict=True)
        ]
        return self._rest(hidden, torch.cat(mixed, 1).transpose(0, 1).reshape(hidden.shape))

    def _heads(self, hidden: Tensor, places: Places) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each [..., tokens, heads, features]."""
        x = self.attention_norm(hidden) if self.is_pre_norm else hidden
        both = self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = both.unbind(-3)
        if self.theta is not None:
            cosine, sine = (part[:, None] for part in places.rotations[self.theta])
            query, key = (_rotated(part, cosine, sine) for part in (query, key))
        return query, key, value

    def _rest(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        hidden = hidden + self.attention_output(mixed)
        if self.is_pre_norm:
            return hidden + self._mlp(self.output_norm(hidden))
        hidden = self.attention_norm(hidden)
        out: Tensor = self.output_norm(hidden + self._mlp(hidden))
        return out

    def _mlp(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        if self.is_gated:
            acted, factor = inner.chunk(2, -1)
            inner = self.activation(acted) * factor
        else:
            inner = self.activation(inner)
        out: Tensor = self.down(inner)
        return out


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


class Head(nn.Module):
    """Classifier behind an encoder: [requests, features] -> logits [requests, labels]."""

    def __init__(self, config: BertConfig, head: HeadConfig) -> None:
        super().__init__()
        self.pool = nn.Linear(config.hidden_size, config.hidden_size, bias=head.has_pool_bias)
        self.norm = norm_of(config) if head.has_norm else nn.Identity()
        self.classifier = nn.Linear(config.hidden_size, len(head.labels))
        self.activation = ACTIVATIONS[head.activation]

    def forward(self, vector: Tensor) -> Tensor:
        """Return the logits."""
        out: Tensor = self.classifier(self.norm(self.activation(self.pool(vector))))
        return out
