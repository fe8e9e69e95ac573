"""Recurrent layers in torch's operators: Mamba-2 (Dao and Gu, 2024) and gated delta nets (Yang et al., 2024).

Both keep a matrix S for each head. A token with key k, query q and value v changes it, ``S = decay * S + u k^T``, and
gets ``S q``. In Mamba-2 (rule "decay") u is the value times the token's step. In a delta net (rule "delta") it is the
value less what S has for the key, times the token's rate. Values, keys and queries pass a short convolution first.

Sizes and parts are read from either layout. Tokens of a request follow one another, here and in the native program
alike: so a prompt may be cut anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.blocks import Attention, Step
from mlsys_orca.model.config import ModelConfig, RecurrentPart, refuse
from mlsys_orca.model.config_readers import GgufFields
from mlsys_orca.model.latent import rows_of
from mlsys_orca.model.layers import Linear
from mlsys_orca.model.operator_reader import OperatorReader
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


GGUF_STEMS = {
    "in": "blk.{}.ssm_in",
    "taps": "blk.{}.ssm_conv1d",
    "decay": "blk.{}.ssm_a",
    "step_bias": "blk.{}.ssm_dt.bias",
    "skip": "blk.{}.ssm_d",
    "gate_norm": "blk.{}.ssm_norm",
    "out": "blk.{}.ssm_out",
}


def part_from_gguf(
    fields: GgufFields, layers: Sequence[bool], *, rule: Literal["decay", "delta"] = "decay"
) -> RecurrentPart:
    """Return the sizes that a file's metadata states; ``layers``: which ones are recurrent.

    Raises:
        InvalidInputError: a key is missing, or the sizes do not fit each other.
    """
    heads, inner = fields.get("ssm.time_step_rank"), fields.get("ssm.inner_size")
    size = inner // max(1, heads)
    if heads * size != inner:
        raise InvalidInputError(f"{heads} recurrent heads cannot share {inner} features")
    return RecurrentPart(
        rule=rule,
        layers=tuple(layers),
        num_heads=heads,
        num_groups=fields.get("ssm.group_count"),
        head_dim=size,
        state_size=fields.get("ssm.state_size"),
        num_taps=fields.get("ssm.conv_kernel"),
        norm_eps=fields.get("attention.layer_norm_rms_epsilon"),
    )


def check_steps(raw: Mapping[str, Any]) -> None:
    """Refuse what a ``config.json`` may ask of steps and activations of recurrent layers, and is not implemented."""
    low, high = raw.get("time_step_limit") or (0.0, inf)
    is_open = high in (inf, {"__float__": "Infinity"})  # as transformers writes it
    refuse(low != 0 or not is_open, "steps of recurrent layers that are clamped (time_step_limit)")
    refuse(
        raw.get("hidden_act", "silu") not in ("silu", "swish"), "recurrent layers with an activation other than silu"
    )


def read_mixer(config: ModelConfig, read: OperatorReader, index: int) -> Recurrence:
    """Read the recurrent part of layer ``index``, whose first product gives gates, values, keys, queries and steps."""
    part, hidden, at = config.recurrent, config.hidden_size, (index,)
    assert part is not None
    inner, channels, heads = part.num_values, part.num_channels, part.num_heads
    of_heads: tuple[int, ...] = (heads,)
    of_values: tuple[int, ...] = (inner,)
    if read.layout == "gguf":
        of_heads, of_values = (heads, 1), (part.num_groups, inner // part.num_groups)
    gates, mixed = torch.arange(inner), torch.arange(inner, inner + channels)
    steps = torch.arange(inner + channels, inner + channels + heads)
    first = read.linear({"in": inner + channels + heads}, hidden, at=at)
    return Recurrence(
        part,
        part.index(index),
        input=rows_of(first, torch.cat([mixed, gates, steps])),
        taps=_read_taps(part, read, index).T.contiguous(),
        taps_bias=read.bias("taps", channels, at=at),
        decay=_read_decay(read, index, of_heads),
        step_bias=read.unsuffixed("step_bias", (heads,), at=at, dtype=torch.float32),
        skip=read.unsuffixed("skip", of_heads, at=at, dtype=torch.float32).view(-1),
        norm=GateNorm(
            weight=read.tensor("gate_norm", of_values, at=at, dtype=torch.float32).view(-1),
            size=inner // part.num_groups,
            eps=part.norm_eps,
            is_first=False,
        ),
        output=read.linear({"out": hidden}, inner, at=at),
    )


def read_delta_net(config: ModelConfig, read: OperatorReader, index: int) -> Recurrence:
    """Read the recurrent part of layer ``index``: a gated delta net."""
    part, hidden, at = config.recurrent, config.hidden_size, (index,)
    assert part is not None
    heads, groups, values, channels = part.num_heads, part.num_groups, part.num_values, part.num_channels
    # Queries, keys, values and gates stand kind by kind, or, in directories of Qwen3-Next, group by group; rates and
    # steps of heads kind by kind, or group by group.
    is_by_group, are_apart = read.has("qkvz", at=at), read.has("b", at=at)
    counts = {"qkvz": channels + values} if is_by_group else {"qkv": channels, "z": values}
    counts |= {"b": heads, "a": heads} if are_apart else {"ba": 2 * heads}
    both = Linear(read.matrix(counts, hidden, at=at))
    shared, width = groups * part.state_size, values // groups
    rows = torch.arange(channels + values).view(groups if is_by_group else 1, -1)
    sizes = [part.state_size, part.state_size, width, width] if is_by_group else [shared, shared, values, values]
    queries, keys, own, gates = torch.split(rows, sizes, dim=1)
    rates, steps = (channels + values + torch.arange(2 * heads)).view(1 if are_apart else groups, 2, -1).unbind(1)
    order = torch.cat([each.flatten() for each in (own, keys, queries, gates, steps, rates)])
    fp32: dict[str, Any] = {"at": at, "dtype": torch.float32}
    queries, keys, own = torch.split(_read_taps(part, read, index), [shared, shared, values])
    return Recurrence(
        part,
        part.index(index),
        input=rows_of(both, order),
        taps=torch.cat([own, keys, queries]).T.contiguous(),
        taps_bias=None,
        decay=_read_decay(read, index, (heads,)),
        step_bias=read.unsuffixed("step_bias", (heads,), **fp32),
        skip=None,
        norm=GateNorm(
            weight=read.tensor("gate_norm", (part.head_dim,), **fp32).repeat(heads),
            size=part.head_dim,
            eps=part.norm_eps,
            is_first=True,
        ),
        output=read.linear({"out": hidden}, values, at=at),
    )


def _read_taps(part: RecurrentPart, read: OperatorReader, index: int) -> Tensor:
    """Read the factors of a convolution, fp32 [num_channels, num_taps]."""
    between = () if read.layout == "gguf" else (1,)
    shape = (part.num_channels, *between, part.num_taps)
    return read.tensor("taps", shape, at=(index,), dtype=torch.float32).view(part.num_channels, part.num_taps)


def _read_decay(read: OperatorReader, index: int, shape: tuple[int, ...]) -> Tensor:
    """Read what the heads' states lose, fp32 [num_heads] below 0, of which directories have the logarithm."""
    found = read.unsuffixed("decay", shape, at=(index,), dtype=torch.float32).view(-1)
    return found if read.layout == "gguf" else -found.exp()
