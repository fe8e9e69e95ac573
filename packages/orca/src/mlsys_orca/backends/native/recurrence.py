"""Operators of recurrent layers and gates as the native program takes them; see :mod:`.binding`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mlsys_core.native import Struct, new
from mlsys_orca.backends.native.plan import Convolve, Gate, Scan
from mlsys_orca.model.recurrent import KEY_EPS
from torch import Tensor


def bind_recurrence(
    operator: Convolve | Scan | Gate,
    structs: Mapping[str, type[Struct]],
    number: Mapping[str, int],
    keep: Callable[[Tensor | None], int | None],
) -> Struct:
    """Return ``operator`` as the native program takes it.

    Args:
        operator: One of the plan.
        structs: The program's, by name.
        number: Of each register.
        keep: Holds on to numbers and says where they are.
    """
    if isinstance(operator, Gate):
        norm = operator.norm
        kind = "sigmoid_alone"
        if norm is not None:
            kind = "norm_then_silu" if norm.is_first else "silu_then_norm"
        return new(
            structs["Gate"],
            source=number[operator.source],
            gate=number[operator.gate],
            target=number[operator.target],
            gate_column=operator.column,
            kind=kind,
            size=operator.size,
            group=operator.size if norm is None else norm.size,
            weight=None if norm is None else keep(norm.weight),
            eps=0.0 if norm is None else norm.eps,
        )
    mixer, registers = operator.recurrence, (number[operator.source], number[operator.target])
    part = mixer.part
    begin = mixer.index * part.num_floats
    if isinstance(operator, Convolve):
        return new(
            structs["Convolve"],
            source=registers[0],
            target=registers[1],
            num_channels=part.num_channels,
            num_taps=part.num_taps,
            factors=keep(mixer.taps),
            bias=keep(mixer.taps_bias),
            state=begin,
        )
    steps = part.num_channels + part.num_values
    return new(
        structs["Scan"],
        source=registers[0],
        target=registers[1],
        rule=part.rule,
        num_heads=part.num_heads,
        num_groups=part.num_groups,
        is_tiled=part.is_tiled,
        head_dim=part.head_dim,
        state_size=part.state_size,
        steps=number[operator.steps],
        step_column=steps,
        rate_column=steps + part.num_heads,
        decay=keep(mixer.decay),
        step_bias=keep(mixer.step_bias),
        skip=keep(mixer.skip),
        key_eps=KEY_EPS,
        state=begin + part.num_kept_inputs,
    )
