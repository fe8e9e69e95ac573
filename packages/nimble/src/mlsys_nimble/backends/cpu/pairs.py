"""The kernel of products of bf16 pairs (pairs.h)."""

from __future__ import annotations

from typing import Any

from mlsys_nimble.backends.cpu.images import image, window
from mlsys_nimble.backends.cpu.library import Kernel, View, load_bf16
from mlsys_nimble.backends.cpu.packing import pack_bias, pack_pairs
from mlsys_nimble.ir import operators
from torch import Tensor


def product(
    kind: operators.Convolution,
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
