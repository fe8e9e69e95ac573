"""Lowering of operators to kernels: one function a kind, which binds its tensors.

An operator without a kernel for its dtypes or shapes runs in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Literal

from mlsys_nimble.backends.cpu import convolutions
from mlsys_nimble.backends.cpu.library import DTYPES, MAX_RANK, Kernel, View, load_bf16
from mlsys_nimble.backends.cpu.own_weights import Reader, is_readable
from mlsys_nimble.backends.table import Call, find
from mlsys_nimble.ir import operators as kinds
from mlsys_nimble.ir.program import Operator, Program, ValueId, ValueType
from torch import Tensor

BF16 = "bf16 weights"
IN_PLACE = "in place"


def kernel_for(operator: Operator, views: Mapping[ValueId, View], constants: Mapping[ValueId, Tensor]) -> Kernel | None:
    """Bind the operator's usual kernel; return None if it has none.

    Args:
        operator: Operator that the layout does not run in place.
        views: Memory of its inputs and outputs.
        constants: Tensors that never change, so that kernels may pack them.
    """
    call = Call(
        operator.kind,
        [views[value] for value in operator.inputs],
        [constants.get(value) for value in operator.inputs],
        views[operator.outputs[0]],
    )
    found = find(type(operator.kind))
    integers = (kinds.IntegerProduct,)  # weights are packed; no kernel reads their dtype
    every = (*call.inputs[: 1 if isinstance(operator.kind, integers) else None], call.out)
    if found.lower is None or any(view.dtype not in DTYPES or len(view.shape) > MAX_RANK for view in every):
        return None
    if any(0 in view.shape for view in every):
        return None
    if found.dtypes is not None and any(view.dtype not in found.dtypes for view in every):
        return None
    return found.lower(call)


def other_kernels(
    operator: Operator, views: Mapping[ValueId, View], constants: Mapping[ValueId, Tensor], *, winograd: int
) -> dict[str, Callable[[], Kernel]]:
    """Return kernels that may be faster than the usual one, by name, for the paper's kernel selection (section 3.3).

    The operator must have a kernel by :func:`kernel_for`. ``winograd`` is the largest tile allowed.
    """
    weight = _weight(operator, constants)
    names = [] if weight is None or not _is_bf16(weight) else [BF16]
    names += [f"winograd {size}" for size in (2, 4) if size <= winograd]
    found = {name: _named(name, operator, views, constants) for name in names}
    return {name: make for name, make in found.items() if make is not None}


def named_kernel(
    name: str, operator: Operator, views: Mapping[ValueId, View], constants: Mapping[ValueId, Tensor]
) -> Kernel | None:
    """Bind the kernel of this name, one of :func:`other_kernels`; the usual one where there is none of it."""
    make = _named(name, operator, views, constants)
    return kernel_for(operator, views, constants) if make is None else make()


def _named(
    name: str, operator: Operator, views: Mapping[ValueId, View], constants: Mapping[ValueId, Tensor]
) -> Callable[[], Kernel] | None:
    kind, weight = operator.kind, _weight(operator, constants)
    if not isinstance(kind, kinds.Convolution | kinds.Linear) or weight is None:
        return None
    inputs, out = [views[value] for value in operator.inputs], views[operator.outputs[0]]
    if name == IN_PLACE:
        if not _can_be_in_place(kind, weight, inputs[0]):
            return None
        own = Call(kind, inputs, [constants.get(value) for value in operator.inputs], out, in_place=True)
        return lambda: _bound(own)
    if name == BF16:
        call = Call(kind, inputs, [constants.get(value) for value in operator.inputs], out, load_bf16())
        return lambda: _bound(call)
    tile: Literal[2, 4] | None = {"winograd 2": 2, "winograd 4": 4}.get(name)  # type: ignore[assignment]
    if tile is None or not isinstance(kind, kinds.Convolution) or not convolutions.is_winograd(kind, weight):
        return None
    bias = constants[operator.inputs[2]] if kind.has_bias else None
    residual = inputs[-1] if kind.epilogue.has_residual else None
    return lambda: convolutions.winograd(kind, inputs[0], weight, bias, out, size=tile, residual=residual)


def _weight(operator: Operator, constants: Mapping[ValueId, Tensor]) -> Tensor | None:
    is_product = isinstance(operator.kind, kinds.Convolution | kinds.Linear)
    return constants.get(operator.inputs[1]) if is_product else None


def packed_inputs(operator: Operator, values: Sequence[ValueType], kernel: Kernel | None = None) -> tuple[ValueId, ...]:
    """Return the inputs that an operator's kernel (None: the usual one) packs if they are constants."""
    packs = find(type(operator.kind)).packs
    packed = () if packs is None else packs(operator, values)
    own = operator.inputs[1:2] if kernel is not None and kernel.is_in_place else ()
    return tuple(value for value in packed if value not in own)


def readers_of(
    program: Program,
    views: Mapping[ValueId, View],
    constants: Mapping[ValueId, Tensor],
    skipped: Collection[int],
    own: Collection[int],
) -> list[Reader]:
    """Return the uses of own weights, given by their ids, by operators that pack; ``skipped`` ones do nothing."""
    found = []
    for index, operator in enumerate(program.operators):
        packed = () if index in skipped else packed_inputs(operator, program.values)
        for value in packed:
            weight = constants.get(value)
            if weight is None or id(weight) not in own:
                continue
            x = views[operator.inputs[0]]
            is_weight = value == operator.inputs[1] and _can_be_in_place(operator.kind, weight, x)
            found.append(Reader(index, value, weight.nbytes, is_weight and not _is_bf16(weight)))
    return found


def _can_be_in_place(kind: object, weight: Tensor, x: View) -> bool:
    """Return whether an operator is a linear of one row whose kernel can read the weight where it lies."""
    is_row = prod(x.shape) == x.shape[-1] and (x.strides[-1] == 1 or x.shape[-1] == 1)
    return isinstance(kind, kinds.Linear) and is_row and is_readable(weight)


def _is_bf16(weight: Tensor) -> bool:
    """Return whether bf16 holds a weight exactly; False for depthwise convolutions, whose weights are small."""
    return weight.shape[1] > 1 and bool((weight.bfloat16() == weight).all())


def _bound(call: Call) -> Kernel:
    lower = find(type(call.kind)).lower
    kernel = None if lower is None else lower(call)
    assert kernel is not None, "no kernel with other weights where there is one with the usual"
    return kernel
