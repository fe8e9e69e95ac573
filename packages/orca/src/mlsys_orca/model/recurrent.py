"""Recurrent layers in torch's operators: Mamba-2 (Dao and Gu, 2024) and gated delta nets (Yang et al., 2024).

Both keep a matrix S for each head. A token with key k, query q and value v changes it, ``S = decay * S + u k^T``, and
gets ``S q``. In Mamba-2 (rule "decay") u is the value times the token's step. In a delta net (rule "delta") it is the
value less what S has for the key, times the token's rate. Values, keys and queries pass a short convolution first.

Tokens of a request follow one another, here and in the native program alike: so a prompt may be cut anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from mlsys_orca.model.blocks import Attention, Step
from mlsys_orca.model.layers import Linear
from mlsys_orca.model.states import RecurrentPart
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

KEY_EPS = 1e-6  # added to a key's or query's squared length, by which a delta net divides it


@dataclass(frozen=True, slots=True, kw_only=True)
class GateNorm:
    """RMS norm of neighbouring features, and the gate that they pass: ``silu(gate)``."""

    weight: Tensor  # fp32 [num_values]
    size: int  # features that are normalised together
    eps: float
    is_first: bool  # the norm comes before the gate, not behind it

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return ``x`` fp32 [num_tokens, num_values] let through by ``gate``."""
        if not self.is_first:
            x = x * silu(gate)
        parts = x.view(len(x), -1, self.size)
        normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + self.eps)
        x = normed.view(x.shape) * self.weight
        return x * silu(gate) if self.is_first else x


class Recurrence(nn.Module):
    """The recurrent part of one layer, in attention's place.

    Args:
        part: Sizes.
        index: Number of the layer among the recurrent ones.
        input: hidden_size -> values, keys, queries, then the gate of each value, each head's step, and with rule
            "delta" each head's rate.
        taps: fp32 [num_taps, num_channels] factors of the convolution, the newest input's last.
        taps_bias: fp32 [num_channels]; None: none.
        decay: fp32 [num_heads] below 0: ``exp(decay * softplus(step + step_bias))`` is what a token leaves of a state.
        step_bias: fp32 [num_heads].
        skip: fp32 [num_heads] factors of the values that are added to what a head gives; None: 0.
        norm: Of what all heads give.
        output: num_values -> hidden_size.
    """

    def __init__(
        self,
        part: RecurrentPart,
        index: int,
        *,
        input: Linear,  # noqa: A002 - the field's word
        taps: Tensor,
        taps_bias: Tensor | None,
        decay: Tensor,
        step_bias: Tensor,
        skip: Tensor | None,
        norm: GateNorm,
        output: Linear,
    ) -> None:
        super().__init__()
        self.part, self.index = part, index
        self.input, self.output = input, output
        self.taps, self.taps_bias = taps, taps_bias
        self.decay, self.step_bias, self.skip = decay, step_bias, skip
        self.norm = norm

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Run over normalised ``x`` [num_tokens, hidden_size] -> same shape; change the requests' states."""
        part, projected = self.part, self.input(x).float()
        sizes = [part.num_channels, part.num_values, part.num_heads]
        mixed, gate, steps, rates = torch.split(projected, [*sizes, projected.shape[1] - sum(sizes)], dim=1)
        found = torch.empty_like(gate)
        states = step.kv_cache.states
        assert states is not None, "the cache of a recurrent model has them"
        for request in step.inputs.batch.requests:
            own = slice(request.start, request.stop)
            kept, state = states.of(self.index, request.state_slot)
            if request.num_computed_tokens == 0:
                kept.zero_()
                state.zero_()
            found[own] = self._scan(state, self._convolve(kept, mixed[own]), steps[own], rates[own])
        out: Tensor = self.output(self.norm(found, gate).to(x.dtype))
        return out

    def _convolve(self, kept: Tensor, mixed: Tensor) -> Tensor:
        """Pass ``mixed`` [tokens, num_channels] of one request through the convolution; ``kept`` follows."""
        joined = torch.cat([kept, mixed])
        kept.copy_(joined[len(mixed) :])
        out = sum(joined[tap : tap + len(mixed)] * factors for tap, factors in enumerate(self.taps))
        assert isinstance(out, Tensor)
        return silu(out if self.taps_bias is None else out + self.taps_bias)

    def _scan(self, state: Tensor, mixed: Tensor, steps: Tensor, rates: Tensor) -> Tensor:
        """Change ``state`` by one request's tokens and return what they get, [tokens, num_values]."""
        part, shared = self.part, self.part.num_groups * self.part.state_size
        values, keys, queries = torch.split(mixed, [part.num_values, shared, shared], dim=1)
        values = values.view(-1, part.num_heads, part.head_dim)
        keys, queries = (
            _of_heads(each.view(-1, part.num_groups, part.state_size), part.num_heads // part.num_groups, part.is_tiled)
            for each in (keys, queries)
        )
        steps = softplus(steps + self.step_bias)
        left = torch.exp(self.decay * steps)
        if part.rule == "delta":
            keys, queries = (each * torch.rsqrt(each.square().sum(-1, True) + KEY_EPS) for each in (keys, queries))
            queries, rates = queries * part.state_size**-0.5, rates.sigmoid()
        found = torch.empty_like(values)
        for token, value in enumerate(values):
            key = keys[token][:, None]  # [heads, 1, state_size]
            state *= left[token][:, None, None]
            if part.rule == "delta":
                new = (value - (state * key).sum(-1)) * rates[token][:, None]
            else:
                new = value * steps[token][:, None]
            state += new[..., None] * key
            found[token] = (state * queries[token][:, None]).sum(-1)
        if self.skip is not None:
            found += values * self.skip[:, None]
        return found.view(len(found), -1)


def _of_heads(shared: Tensor, times: int, is_tiled: bool) -> Tensor:
    """Return what each head has of ``shared`` [tokens, groups, features]."""
    return shared.repeat(1, times, 1) if is_tiled else shared.repeat_interleave(times, 1)


class MixerLayer(nn.Module):
    """A layer of one branch, without an MLP (Mamba-2)."""

    def __init__(self, *, norm: nn.Module, mixer: nn.Module) -> None:
        super().__init__()
        self.norm, self.mixer = norm, mixer

    def forward(self, x: Tensor, step: Any) -> Tensor:
        """Run the layer on states [num_tokens, hidden_size] fp32 -> same shape."""
        out: Tensor = x + self.mixer(self.norm(x), step)
        return out


class GatedAttention(nn.Module):
    """Attention whose heads' results pass gates, ``sigmoid(gate)``, before the last product (Qwen3-Next, 2025).

    Args:
        attention: Its first product gives the gates behind the values, num_heads * head_dim of them.
    """

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Attend like :class:`Attention`."""
        own = self.attention
        qkv = own.qkv(x)
        gate = qkv[:, own.num_all * own.head_dim :]
        attended = own.attend(qkv[:, : own.num_all * own.head_dim], step)
        out: Tensor = own.output(attended * torch.sigmoid(gate))
        return out
