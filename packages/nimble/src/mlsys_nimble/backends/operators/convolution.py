"""Convolutions and linears (``cpu/convolutions.py`` binds their kernels), and products of bf16 pairs (pairs.h)."""

from __future__ import annotations

from collections.abc import Callable

from mlsys_nimble.backends.cpu import convolutions
from mlsys_nimble.backends.cpu.library import SPACE, Kernel, View, load_bf16
from mlsys_nimble.backends.cpu.packing import pack_pairs
from mlsys_nimble.backends.reference.pointwise import with_epilogue
from mlsys_nimble.backends.table import FLOAT32, Call, Family, Run, find, weights_of
from mlsys_nimble.ir import operators as kinds
from mlsys_nimble.ir.program import ValueType
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

FAMILY = Family()


@FAMILY.meaning(kinds.Convolution)
def _convolution(kind: kinds.Convolution, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    convolve: Callable[..., Tensor] = (F.conv1d, F.conv2d, F.conv3d)[len(kind.stride) - 1]
    symmetric = all(before == after >= 0 for before, after in kind.padding)
    padding = tuple(before for before, _ in kind.padding) if symmetric else 0
    around = [amount for pair in reversed(kind.padding) for amount in pair]

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x if symmetric else F.pad(x, around)
        return convolve(x, weight, bias, kind.stride, padding, kind.dilation, kind.groups)

    return with_epilogue(kind.epilogue, run)


@FAMILY.lowering(kinds.Convolution, dtypes=FLOAT32, packs=weights_of)
def _lower_convolution(call: Call) -> Kernel | None:
    weight, bias = call.weights[1], call.weights[2] if call.kind.has_bias else None
    if weight is None or (call.kind.has_bias and bias is None) or len(call.out.shape) > SPACE + 2:
        return None
    residual = call.inputs[-1] if call.kind.epilogue.has_residual else None
    if convolutions.is_depthwise(call.kind, weight):
        return convolutions.depthwise(call.kind, call.inputs[0], weight, bias, call.out, residual=residual)
    if call.library is None and convolutions.is_grouped(call.kind, weight):
        return convolutions.grouped(call.kind, call.inputs[0], weight, bias, call.out, residual=residual)
    return convolutions.convolution(
        call.kind, call.inputs[0], weight, bias, call.out, residual=residual, library=call.library
    )


@FAMILY.meaning(kinds.Separable)
def _separable(kind: kinds.Separable, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    first = _convolution(kind.depthwise, inputs, result)
    second = _convolution(kind.pointwise, inputs, result)
    cut = 1 + kind.depthwise.has_bias

    def run(x: Tensor, *others: Tensor) -> Tensor:
        made: Tensor = second(first(x, *others[:cut]), *others[cut:])
        return made

    return run


@FAMILY.lowering(kinds.Separable, dtypes=FLOAT32, packs=weights_of)
def _lower_separable(call: Call) -> Kernel:
    constants = iter(call.weights[1:])
    weights, biases = [], []
    for kind in (call.kind.depthwise, call.kind.pointwise):
        weights.append(_known(next(constants)))
        biases.append(next(constants) if kind.has_bias else None)
    residual = call.inputs[-1] if call.kind.epilogue.has_residual else None
    return convolutions.separable(call.kind, call.inputs[0], weights, biases, call.out, residual=residual)


def _known(constant: Tensor | None) -> Tensor:
    assert constant is not None, "fuse_separables takes constants only"
    return constant


@FAMILY.meaning(kinds.Linear)
def _linear(kind: kinds.Linear, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    return with_epilogue(kind.epilogue, F.linear)


@FAMILY.lowering(kinds.Linear, dtypes=FLOAT32, packs=weights_of)
def _lower_linear(call: Call) -> Kernel | None:
    weight, bias = call.weights[1], call.weights[2] if call.kind.has_bias else None
    if weight is None or (call.kind.has_bias and bias is None):
        return None
    residual = rows(call.inputs[-1]) if call.kind.epilogue.has_residual else None
    x, out = rows(call.inputs[0]), rows(call.out)
    if call.in_place:
        return convolutions.dots(call.kind.epilogue, x, weight, bias, out, residual=residual)
    return convolutions.linear(call.kind, x, weight, bias, out, residual=residual, library=call.library)


def rows(view: View) -> View:
    """Return a view [*, K] as [rows, K]; the layout ensures that rows are equally far apart."""
    count = 1
    for size in view.shape[:-1]:
        count *= size
    lead = [stride for size, stride in zip(view.shape[:-1], view.strides[:-1], strict=True) if size != 1]
    return view.reshaped((count, view.shape[-1]), (lead[-1] if lead else view.shape[-1], view.strides[-1]))


def pixels(view: View) -> View:
    """Return rows [*, K] as a line of pixels [1, K, rows]."""
    found = rows(view)
    return found.reshaped((1, *found.shape[::-1]), (0, *found.strides[::-1]))


@FAMILY.meaning(kinds.Bf16Product)
def _product(kind: kinds.Bf16Product, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    meaning = find(type(kind.main)).meaning
    assert meaning is not None
    run = meaning(kind.main, inputs, result)

    def multiply(x: Tensor, *rest: Tensor) -> Tensor:
        made: Tensor = run(x.bfloat16().float(), *rest)
        return made

    return multiply


@FAMILY.lowering(kinds.Bf16Product, dtypes=FLOAT32, packs=weights_of)
def _lower_product(call: Call) -> Kernel | None:
    main: kinds.Convolution | kinds.Linear = call.kind.main
    weight, bias = call.weights[1], call.weights[2] if main.has_bias else None
    if weight is None or (main.has_bias and bias is None) or len(call.out.shape) > SPACE + 2:
        return None
    x, out = call.inputs[0], call.out
    residual = call.inputs[-1] if main.epilogue.has_residual else None
    if isinstance(main, kinds.Linear):
        x, out = pixels(x), pixels(out)
        residual = None if residual is None else pixels(residual)
        main, weight = kinds.Convolution((1,), ((0, 0),), (1,), 1, main.has_bias, main.epilogue), weight[:, :, None]
    return pairs_kernel(main, x, weight, bias, out, residual=residual)


def pairs_kernel(
    kind: kinds.Convolution,
    x: View,
    weight: Tensor,
    bias: Tensor | None,
    out: View,
    *,
    residual: View | None = None,
) -> Kernel:
    """Bind a convolution whose input is rounded to bf16; a linear is one over pixels of one line.

    Shapes: x [N, C, *space], weight [O, C/groups, *kernel] of values that bf16 holds, bias [O], residual and out
    [N, O, *space'], all float32. Channels of ``out`` and ``residual`` are side by side.
    """
    library = load_bf16()
    assert out.strides[1] == 1 or out.shape[1] == 1, "channels of the result are not side by side"
    packed = pack_pairs(weight, kind.groups, library.kernel_lanes())
    return convolutions.bind_packed(
        "pairs_convolution", kind, x, weight, packed, bias, out, residual=residual, library=library
    )
