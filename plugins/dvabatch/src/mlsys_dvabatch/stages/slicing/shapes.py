"""The one shape that requests to an exported program have: its own, or one of those that it allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor

_FIX = "export it with only the first dimension dynamic"


def fixed_example(
    path: Path, program: torch.export.ExportedProgram, args: Sequence[Tensor] | None, given: Sequence[Tensor] | None
) -> tuple[Tensor, ...]:
    """Return the inputs of one request, ``[1, ...]`` each.

    Requests of one batch have one shape. A program that allows several, like texts of any length, would be frozen at
    its example's, so the shape has to be said then.

    Args:
        path: Path of the file, for messages.
        program: Exported for any batch size.
        args: Inputs that fit it; None: none are known.
        given: Input of the shape that was asked for; None: the program's own.

    Raises:
        InvalidInputError: It allows several shapes and none was asked for, or not the one that was.
    """
    names = set(program.graph_signature.user_inputs)
    inputs = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    allowed = {node.name: [_bounds(program, size) for size in node.meta["val"].shape] for node in inputs}
    if given is None:
        for name, sizes in allowed.items():
            for dimension, (least, most) in enumerate(sizes):
                if dimension and least != most:
                    raise InvalidInputError(
                        f"{path}: dimension {dimension} of input {name!r} is dynamic ({_range(least, most)}), and the "
                        f"requests of a batch have one shape here: say which with --shape, or {_FIX}"
                    )
        assert args is not None
        return tuple(value[:1] for value in args)
    if len(allowed) != len(given):
        raise InvalidInputError(
            f"{path} takes {len(allowed)} inputs, and --shape is the shape of one: leave it out; if a dimension of the "
            f"inputs is dynamic, {_FIX}"
        )
    made = []
    for (name, sizes), value, node in zip(allowed.items(), given, inputs, strict=True):
        fits = len(sizes) == value.ndim and all(
            least <= size <= most for size, (least, most) in zip(value.shape[1:], sizes[1:], strict=True)
        )
        if not fits:
            wanted = ", ".join(_range(*each) for each in sizes[1:])
            raise InvalidInputError(
                f"{path}: input {name!r} takes requests of shape ({wanted}), got {list(value.shape[1:])}"
            )
        dtype = node.meta["val"].dtype
        made.append(value.to(dtype) if dtype.is_floating_point else torch.zeros(value.shape, dtype=dtype))
    return tuple(made)


def _bounds(program: torch.export.ExportedProgram, size: Any) -> tuple[float, float]:
    """Return the least and the largest value of a dimension."""
    if isinstance(size, int):
        return size, size
    known = program.range_constraints.get(size.node.expr)
    if known is None:  # follows from other dimensions
        return 0, float("inf")
    return float(known.lower), float(known.upper)


def _range(least: float, most: float) -> str:
    if least == most:
        return f"{least:g}"
    return f"{least:g} or more" if most > 1 << 62 else f"{least:g} to {most:g}"
