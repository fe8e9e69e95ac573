"""The shapes that requests to an exported program have: several, or one of those that it allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_dvabatch.stages.slicing.sizes import Sizes, sizes_of
from torch import Tensor

_FIX = "export it with only the first dimension dynamic"


def fixed_example(
    path: Path, program: torch.export.ExportedProgram, args: Sequence[Tensor] | None, given: Sequence[Tensor] | None
) -> tuple[Tensor, ...]:
    """Return the inputs of one request, ``[1, ...]`` each.

    Args:
        path: Path of the file, for messages.
        program: Exported for any batch size.
        args: Inputs that fit it; None: none are known.
        given: Input of the shape that was asked for; None: the program's own.

    Raises:
        InvalidInputError: It does not allow the shape that was asked for.
    """
    inputs = _inputs(program)
    allowed = {node.name: [_bounds(program, size) for size in node.meta["val"].shape] for node in inputs}
    if given is None:
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


def dynamic_sizes(program: torch.export.ExportedProgram, args: Sequence[Tensor]) -> Sizes | None:
    """Return the sizes that requests may have; None: all have one shape.

    Args:
        program: Exported for any batch size.
        args: Inputs that fit it, ``[requests, ...]`` each.
    """
    inputs = _inputs(program)
    axes = [
        [size if isinstance(size, int) else size.node.expr for size in node.meta["val"].shape[1:]] for node in inputs
    ]
    shapes = [tuple(value.shape[1:]) for value in args]
    sizes = sizes_of([node.name for node in inputs], axes, program.range_constraints, shapes)
    return sizes if sizes.symbols else None


def vocabularies(module: torch.fx.GraphModule) -> list[int | None]:
    """Return the exclusive upper bound of each input's integers: rows of the table that it indexes; None: unknown."""
    weights = dict(module.named_parameters()) | dict(module.named_buffers())
    found: list[int | None] = []
    for node in module.graph.nodes:
        if node.op != "placeholder":
            continue
        tables = [
            weights[str(user.args[0].target)].shape[0]
            for user in node.users
            if user.target is torch.ops.aten.embedding.default and str(user.args[0].target) in weights
        ]
        found.append(int(min(tables)) if tables else None)
    return found


def _inputs(program: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    names = set(program.graph_signature.user_inputs)
    return [node for node in program.graph.nodes if node.op == "placeholder" and node.name in names]


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
