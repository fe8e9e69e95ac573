"""Kernels of convolutions and linears, one function for each way of computing; ``backends/operators`` has the rest.

The caller decides where tensors lie and passes a :class:`View` of each; results are written to ``out``, which may be
the same view as ``residual``. A handle keeps only its packed weights alive. :func:`convolution` and :func:`linear` keep
them in bf16 if ``library`` is that of :func:`~.library.load_bf16`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Literal

from mlsys_nimble.backends.cpu.library import SPACE, Kernel, View, load
from mlsys_nimble.backends.cpu.loops import image, in_space, window
from mlsys_nimble.backends.cpu.own_weights import Own, is_readable
from mlsys_nimble.backends.cpu.packing import (
    pack_bias,
    pack_convolution,
    pack_depthwise,
    pack_gemv,
    pack_grouped,
    pack_winograd,
)
from mlsys_nimble.ir import operators
from torch import Tensor


def convolution(
    kind: operators.Convolution,
    x: View,
    weight: Tensor,
    bias: Tensor | None,
    out: View,
    *,
    residual: View | None = None,
    library: Any = None,
) -> Kernel:
    """Bind the usual kernel of a convolution.

    Shapes: x [N, C, *space], weight [O, C/groups, *kernel], residual and out [N, O, *space']. Channels of ``out`` and
    ``residual`` are side by side (stride 1); those of ``x`` too, unless the convolution is ungrouped.
    """
    library = library or load()
    if prod(weight.shape[2:]) == 1 and kind.groups == 1 and _is_pixel(x) and _is_pixel(out):
        return gemv(kind.epilogue, x, weight.flatten(1), bias, out, residual=residual, library=library)
    assert out.strides[1] == 1 or out.shape[1] == 1, "channels of the result are not side by side"
    assert kind.groups == 1 or x.strides[1] == 1, "channels of a grouped convolution are not side by side"
    packed = pack_convolution(weight, kind.groups, library.kernel_lanes(), library.weight_dtype)
    return bind_packed("convolution", kind, x, weight, packed, bias, out, residual=residual, library=library)


def bind_packed(
    name: str,
    kind: operators.Convolution,
    x: View,
    weight: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    out: View,
    *,
    residual: View | None,
    library: Any,
) -> Kernel:
    """Bind the kernel ``name`` of a convolution, with ``packed``, its copy of ``weight``; shapes as in the caller."""
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
    return Kernel(library, name, arguments, packed, shift)


def _is_pixel(view: View) -> bool:
    """Return whether a view is one pixel whose channels are side by side."""
    return prod(view.shape) == view.shape[1] and (view.strides[1] == 1 or view.shape[1] == 1)


def gemv(
    epilogue: operators.Epilogue,
    x: View,
    weight: Tensor,
    bias: Tensor | None,
    out: View,
    *,
    residual: View | None = None,
    library: Any = None,
) -> Kernel:
    """Bind a linear of one row: weight [O, K]; x has K elements, residual and out O, side by side in any dimension."""
    library = library or load()
    packed = pack_gemv(weight, library.kernel_lanes(), library.weight_dtype)
    return _of_one_row("gemv", library, epilogue, x, weight, bias, out, residual, read=packed, keep=packed)


def dots(
    epilogue: operators.Epilogue,
    x: View,
    weight: Tensor,
    bias: Tensor | None,
    out: View,
    *,
    residual: View | None = None,
) -> Kernel:
    """Bind a linear of one row that reads its weight (:func:`is_readable`) where it lies; see :func:`gemv`.

    Each result is the sum of as many partial sums as vectors have lanes, so its rounding is not that of :func:`gemv`.
    """
    assert is_readable(weight), "a weight that no kernel reads in place"
    return _of_one_row("dots", load(), epilogue, x, weight, bias, out, residual, read=weight, keep=Own(weight))


def _of_one_row(
    name: Literal["gemv", "dots"],
    library: Any,
    epilogue: operators.Epilogue,
    x: View,
    weight: Tensor,
    bias: Tensor | None,
    out: View,
    residual: View | None,
    *,
    read: Tensor,
    keep: Any,
) -> Kernel:
    """Bind a linear of one row to a kernel that reads ``read``, the weight or its packed form."""
    shift = pack_bias(bias, weight.shape[0], 1, library.kernel_lanes())
    out_row = out.reshaped((weight.shape[0],), (1,))
    arguments = {
        "x": x.reshaped((weight.shape[1],), (1,)),
        "residual": None if residual is None else residual.reshaped(out_row.shape, (1,)),
        "out": out_row,
        "weights": read.data_ptr(),
        "bias": shift.data_ptr(),
        "epilogue": epilogue,
    }
    return Kernel(library, name, arguments, keep, shift)


def linear(
    kind: operators.Linear,
    x: View,
    weight: Tensor,
    bias: Tensor | None,
    out: View,
    *,
    residual: View | None = None,
    library: Any = None,
) -> Kernel:
    """Bind a linear: x [*, K], weight [O, K], residual and out [*, O], features side by side, * at most four dims."""
    as_convolution = operators.Convolution(
        (1,) * SPACE, ((0, 0),) * SPACE, (1,) * SPACE, 1, kind.has_bias, kind.epilogue
    )
    return convolution(
        as_convolution,
        _pixels(x),
        weight[:, :, None, None, None],
        bias,
        _pixels(out),
        residual=None if residual is None else _pixels(residual),
        library=library,
    )


def _pixels(view: View) -> View:
    """View [*, K] as an image whose channels are K."""
    missing = SPACE + 2 - len(view.shape)
    assert missing >= 0, f"a linear over {len(view.shape)} dims; fold some"
    padded = view.reshaped((*(1,) * missing, *view.shape), (*(0,) * missing, *view.strides))
    return padded.permuted((0, 4, 1, 2, 3))


def is_depthwise(kind: operators.Convolution, weight: Tensor) -> bool:
    """Return whether :func:`depthwise` takes a convolution: one filter a channel, over a line or a plane."""
    return kind.groups == weight.shape[0] and weight.shape[1] == 1 and weight.dim() <= 4


def depthwise(
    kind: operators.Convolution,
    x: View,
    weight: Tensor,
    bias: Tensor | None,
    out: View,
    *,
    residual: View | None = None,
) -> Kernel:
    """Bind a depthwise convolution (:func:`is_depthwise`); channels of all tensors are side by side."""
    assert is_depthwise(kind, weight)
    arguments, *packed = _channelwise_arguments(kind, x, weight, bias, out, residual)
    return Kernel(load(), "depthwise", arguments, *packed)


def _channelwise_arguments(
    kind: operators.Convolution,
    x: View,
    weight: Tensor,
    bias: Tensor | None,
    out: View | None,
    residual: View | None,
    pack: Callable[[Tensor, int], Tensor] = pack_depthwise,
) -> tuple[dict[str, Any], Tensor, Tensor]:
    library = load()
    assert all(view is None or view.shape[1] == 1 or view.strides[1] == 1 for view in (x, out, residual))
    packed = pack(weight, library.kernel_lanes())
    shift = pack_bias(bias, weight.shape[0], 1, library.kernel_lanes())
    arguments = {
        "x": _plane(x),
        "residual": _plane(residual),
        "out": _plane(out),
        "weights": packed.data_ptr(),
        "bias": shift.data_ptr(),
        "kernel": in_space(weight.shape[2:], 1)[1:],
        "stride": in_space(kind.stride, 1)[1:],
        "before": in_space([before for before, _ in kind.padding], 0)[1:],
        "dilation": in_space(kind.dilation, 1)[1:],
        "epilogue": kind.epilogue,
    }
    return arguments, packed, shift


def is_grouped(kind: operators.Convolution, weight: Tensor) -> bool:
    """Return whether :func:`grouped` takes a convolution: groups as wide as they give, which share a vector's lanes."""
    lanes, width = load().kernel_lanes(), weight.shape[1]
    if kind.groups == 1 or width == 1 or lanes % width or weight.shape[0] != kind.groups * width or weight.dim() != 4:
        return False
    return weight.shape[3] == 3 and kind.stride[1] <= 2 and kind.dilation[1] == 1


def grouped(
    kind: operators.Convolution,
    x: View,
    weight: Tensor,
    bias: Tensor | None,
    out: View,
    *,
    residual: View | None = None,
) -> Kernel:
    """Bind a convolution of narrow groups (:func:`is_grouped`); channels of all tensors are side by side."""
    assert is_grouped(kind, weight)
    arguments, *packed = _channelwise_arguments(kind, x, weight, bias, out, residual, pack_grouped)
    return Kernel(load(), "grouped", {"convolution": arguments, "width": weight.shape[1]}, *packed)


def separable(
    kind: operators.Separable,
    x: View,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    out: View,
    *,
    residual: View | None = None,
) -> Kernel:
    """Bind a separable convolution: x [N, C, H, W], residual and out [N, O, H', W'], channels side by side.

    ``weights`` and ``biases`` are those of the depthwise and of the 1x1 convolution.
    """
    library = load()
    assert is_depthwise(kind.depthwise, weights[0])
    assert all(view is None or view.shape[1] == 1 or view.strides[1] == 1 for view in (x, out, residual))
    between = View(None, "float32", (x.shape[0], x.shape[1], *out.shape[2:]), (0, 1, 0, 0))
    first, *kept = _channelwise_arguments(kind.depthwise, x, weights[0], biases[0], between, None)
    packed = pack_convolution(weights[1], 1, library.kernel_lanes())
    shift = pack_bias(biases[1], weights[1].shape[0], 1, library.kernel_lanes())
    arguments = {
        "depthwise": first,
        "residual": residual,
        "out": out,
        "weights": packed.data_ptr(),
        "bias": shift.data_ptr(),
        "epilogue": kind.epilogue,
    }
    return Kernel(library, "separable", arguments, *kept, packed, shift)


def _plane(view: View | None) -> View | None:
    """View [N, C, *space] as [N, C, H, W]."""
    found = image(view)
    if found is None:
        return None
    assert found.shape[2] == 1, "depthwise in three dimensions"
    return found.reshaped(found.shape[:2] + found.shape[3:], found.strides[:2] + found.strides[3:])


def is_winograd(kind: operators.Convolution, weight: Tensor) -> bool:
    """Return whether :func:`winograd` takes a convolution: 3x3, stride 1, channels that fill whole vectors."""
    lanes = load().kernel_lanes()
    whole = weight.shape[0] % lanes == 0 and weight.shape[1] % lanes == 0
    return kind.groups == 1 and weight.shape[2:] == (3, 3) and {*kind.stride, *kind.dilation} == {1} and whole


def winograd(
    kind: operators.Convolution,
    x: View,
    weight: Tensor,
    bias: Tensor | None,
    out: View,
    *,
    size: Literal[2, 4],
    residual: View | None = None,
) -> Kernel:
    """Bind a convolution by Winograd's tiles of ``size`` x ``size`` results (:func:`is_winograd`).

    It needs 2.25 (size 4: 4) times fewer multiplications, rounds more (size 4: about 4e-6 of the result's scale) and
    reads larger weights, so measurement decides. Channels of all tensors are side by side.
    """
    library = load()
    assert is_winograd(kind, weight)
    assert all(view is None or view.strides[1] == 1 for view in (x, out, residual))
    packed = pack_winograd(weight, size, library.kernel_lanes())
    shift = pack_bias(bias, weight.shape[0], 1, library.kernel_lanes())
    arguments = {
        "x": x,
        "residual": residual,
        "out": out,
        "weights": packed.data_ptr(),
        "bias": shift.data_ptr(),
        "before": tuple(before for before, _ in kind.padding),
        "epilogue": kind.epilogue,
    }
    return Kernel(library, f"winograd{size}", arguments, packed, shift)
