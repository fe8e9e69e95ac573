"""Products of bf16 pairs, with their kernel (pairs.h)."""

from __future__ import annotations

from typing import Any

from mlsys_nimble.backends.cpu.images import image, window
from mlsys_nimble.backends.cpu.library import SPACE, Kernel, View, load_bf16
from mlsys_nimble.backends.cpu.packing import pack_bias, pack_pairs
from mlsys_nimble.backends.operators.convolution import pixels
from mlsys_nimble.backends.table import FLOAT32, Call, Family, Run, find, weights_of
from mlsys_nimble.ir import operators as kinds
from mlsys_nimble.ir.program import ValueType
from torch import Tensor

FAMILY = Family()


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
    library: Any = None,
) -> Kernel:
    """Bind a convolution whose input is rounded to bf16; a linear is one over pixels of one line.

    Shapes: x [N, C, *space], weight [O, C/groups, *kernel] of values that bf16 holds, bias [O], residual and out
    [N, O, *space'], all float32. Channels of ``out`` and ``residual`` are side by side.
    """
    library = library or load_bf16()
    assert out.strides[1] == 1 or out.shape[1] == 1, "channels of the result are not side by side"
    packed = pack_pairs(weight, kind.groups, library.kernel_lanes())
    shift = pack_bias(bias, weight.shape[0], kind.groups, library.kernel_lanes())
    arguments = {
        "x": image(x),
        "residual": image(residual),
        "out": image(out),
        "weights": packed.data_ptr(),
        "bias": shift.data_ptr(),
        **window(kind, weight.shape[2:]),
        "groups": kind.groups,
        "epilogue": kind.epilogue,
    }
    return Kernel(library, "pairs_convolution", arguments, packed, shift)
