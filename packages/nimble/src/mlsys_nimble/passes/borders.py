"""Folding of borders around an image, and of crops of a result, into the padding of the operator between them.

Nets that pad, convolve with a stride and crop the first row, as NASNet's reductions do, then compute only what they
need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlsys_nimble.ir.operators import Convolution, Pad, Pool, Slice
from mlsys_nimble.ir.program import Operator, Program
from mlsys_nimble.passes.rewrite import Rewriter


def fold_borders(program: Program) -> Program:
    """Merge slices of a result's space, and constant borders of the input, into convolutions and pools."""
    rewriter = Rewriter(program)
    for position, operator in rewriter:
        cropped = _cropped(rewriter, operator) if isinstance(operator.kind, Slice) else None
        changed = _padded(rewriter, cropped or operator)
        if changed is not operator:
            rewriter.replace(position, changed)
    return rewriter.build()


def _kernel_of(rewriter: Rewriter, operator: Operator) -> Sequence[int]:
    """Return the window's size per dimension of space."""
    if isinstance(operator.kind, Pool):
        return operator.kind.kernel
    return rewriter.type(operator.inputs[1]).shape[2:]


def _cropped(rewriter: Rewriter, operator: Operator) -> Operator | None:
    """Drop the convolution or pool before a slice, and return it with the padding that gives just the slice."""
    cut = operator.kind
    main = rewriter.sole_producer(operator.inputs[0])
    assert isinstance(cut, Slice)
    if main is None or not isinstance(main.kind, Convolution | Pool) or cut.dim < 2 or cut.step != 1:
        return None
    kind, length = main.kind, rewriter.type(operator.outputs[0]).shape[cut.dim]
    if kind.epilogue.has_residual or length == 0:
        return None
    axis = cut.dim - 2
    size = rewriter.type(main.inputs[0]).shape[cut.dim]
    reach = (length - 1) * kind.stride[axis] + kind.dilation[axis] * (_kernel_of(rewriter, main)[axis] - 1) + 1
    before = kind.padding[axis][0] - cut.start * kind.stride[axis]
    pairs = (*kind.padding[:axis], (before, reach - size - before), *kind.padding[axis + 1 :])
    rewriter.drop(main)
    return replace(main, kind=replace(kind, padding=pairs), outputs=operator.outputs)


def _padded(rewriter: Rewriter, operator: Operator) -> Operator:
    """Return the operator with the border before it merged into its padding, where the result is the same."""
    kind = operator.kind
    border = rewriter.producer(operator.inputs[0]) if isinstance(kind, Convolution | Pool) else None
    if border is None or not isinstance(border.kind, Pad) or not isinstance(kind, Convolution | Pool):
        return operator
    amounts = border.kind.amounts
    if any(map(any, amounts[:2])) or not _may_merge(kind, border.kind):
        return operator
    pairs = tuple((own[0] + added[0], own[1] + added[1]) for own, added in zip(kind.padding, amounts[2:], strict=True))
    return replace(operator, kind=replace(kind, padding=pairs), inputs=(border.inputs[0], *operator.inputs[1:]))


def _may_merge(kind: Convolution | Pool, border: Pad) -> bool:
    """Return whether a border and a padding add up.

    They do if the convolution pads with the border's zeros, or if the padding crops the border, so no window sees it.
    """
    pairs = zip(kind.padding, border.amounts[2:], strict=True)
    sides = [side for own, added in pairs for side in zip(own, added, strict=True)]
    if isinstance(kind, Convolution) and border.value == 0:
        return all(added >= 0 or own <= 0 for own, added in sides)
    return all(added == 0 or 0 < added <= -own for own, added in sides)
