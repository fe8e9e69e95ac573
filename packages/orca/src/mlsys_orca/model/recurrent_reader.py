"""Recurrent layers from either layout: their sizes, and the parts of :class:`mlsys_orca.model.recurrent.Recurrence`.

Between the families that have such layers and :mod:`.recurrent`, which computes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Literal

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.config import ModelConfig, refuse
from mlsys_orca.model.gguf_config import GgufFields
from mlsys_orca.model.latent import rows_of
from mlsys_orca.model.layers import Linear
from mlsys_orca.model.operator_reader import OperatorReader
from mlsys_orca.model.recurrent import GateNorm, Recurrence
from mlsys_orca.model.states import RecurrentPart
from torch import Tensor

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
