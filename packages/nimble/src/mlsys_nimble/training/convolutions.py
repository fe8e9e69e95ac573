"""Two-dimensional convolutions of training and their gradients: choice of the algorithm, and kernels.

Weights change at each step, so none are packed ahead of time: kernels transform them within the step. Products of
matrices go to torch's GEMM, into planned memory: nothing is allocated, and memory is reused while it is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from mlsys_nimble.backends.cpu import library as native
from mlsys_nimble.backends.cpu.library import Kernel, View
from mlsys_nimble.ir.operators import NOTHING, Aten, Convolution
from mlsys_nimble.ir.program import Operator, ValueType
from mlsys_nimble.ir.strides import Shape, Strides, channels_last, dense, row_major
from mlsys_nimble.training.kernels import lies_channels_last, load
from mlsys_nimble.training.passes import GRADIENT

FEW_PIXELS = 16  # of a depthwise result: up to here oneDNN takes up to 300 times as long
MANY_TAPS = 25  # of a depthwise window: from here on oneDNN's weight gradient is slower
LEAST_TILES = 16  # of Winograd's algorithm

Looks: TypeAlias = ValueType | View
Role = Literal["forward", "input gradient", "weight gradient"]
Way = Literal["winograd2", "winograd4", "depthwise", "gemm"]


@dataclass(frozen=True, slots=True)
class Work:
    """Convolution of float32 images, or one of its gradients.

    Inputs are x, weight and perhaps a bias; of a gradient dy, x and weight, as in ``aten::convolution_backward``.
    """

    role: Role
    x: Shape  # [N, C, H, W]
    weight: Shape  # [O, C/groups, KH, KW]
    y: Shape  # [N, O, H', W']
    stride: tuple[int, int]
    before: tuple[int, int]  # padding
    dilation: tuple[int, int]
    groups: int
    has_bias: bool


def work_of(operator: Operator, inputs: Sequence[Looks], outputs: Sequence[Looks]) -> Work | None:
    """Return the work of an operator; None if it is no float32 2-d convolution nor one gradient of it."""
    kind = operator.kind
    if any(tensor.dtype != "float32" for tensor in inputs) or len(outputs) != 1:
        return None
    if isinstance(kind, Convolution):
        if len(kind.stride) != 2 or kind.epilogue != NOTHING:
            return None
        before = tuple([start for start, _ in kind.padding])
        shapes = inputs[0].shape, inputs[1].shape, outputs[0].shape
        return _work("forward", shapes, kind.stride, before, kind.dilation, kind.groups, kind.has_bias)
    if not isinstance(kind, Aten) or kind.target != GRADIENT or len(inputs) != 3:
        return None
    _, _, _, _, stride, padding, dilation, is_transposed, _, groups, wanted = kind.arguments
    if is_transposed or len(inputs[1].shape) != 4:
        return None
    shapes = inputs[1].shape, inputs[2].shape, inputs[0].shape
    role: Role = "input gradient" if wanted[0] else "weight gradient"
    return _work(role, shapes, _pair(stride), _pair(padding), _pair(dilation), groups, False)


def _work(role: Role, shapes: tuple[Shape, Shape, Shape], *rest: Any) -> Work | None:
    return None if any(0 in shape for shape in shapes) else Work(role, *shapes, *rest)


def _pair(sizes: Sequence[int]) -> tuple[int, int]:
    return (sizes[0], sizes[-1])


def way_of(work: Work, lanes: int) -> Way | None:
    """Choose the algorithm of a convolution or gradient; None: torch's.

    A convolution of single pixels is a GEMM. 3x3 convolutions and both their gradients use Winograd's minimal
    filtering, with the tiles that need the fewest multiplications. Depthwise convolutions of small images, and the
    gradients of large depthwise windows, have kernels of their own.

    Args:
        work: Convolution or gradient.
        lanes: Number of channels in a vector.
    """
    window = work.weight[2:]
    is_dense = work.stride == work.dilation == (1, 1) and work.groups == 1
    if is_dense and window == (1, 1) and work.before == (0, 0) and work.x[2:] == work.y[2:]:
        return "gemm"
    if work.x[1] % lanes or work.y[1] % lanes:
        return None
    if is_dense and window == (3, 3) and all(0 <= padding <= 2 for padding in work.before):
        shape = work.x if work.role == "input gradient" else work.y
        tiles = {size: shape[0] * prod(-(-extent // size) for extent in shape[2:]) for size in (2, 4)}
        size: Literal[2, 4] = 4 if 36 * tiles[4] <= 16 * tiles[2] else 2
        weights_per_tile = 256 if work.role == "weight gradient" else 1024
        if tiles[size] < max(LEAST_TILES, prod(work.weight[:2]) // weights_per_tile):
            return None  # transforms of the weights would take longer than they save
        return "winograd2" if size == 2 else "winograd4"
    is_depthwise = work.groups == work.x[1] == work.y[1] > 1
    is_ours = prod(work.y[2:]) <= FEW_PIXELS and not work.has_bias
    is_ours |= work.role == "weight gradient" and prod(window) >= MANY_TAPS
    return "depthwise" if is_depthwise and is_ours else None


def strides_of_result(work: Work) -> Strides:
    """Return channels-last strides for images, row-major ones for gradients of weights."""
    if work.role == "weight gradient":
        return dense(work.weight, row_major(4))
    return dense(work.y if work.role == "forward" else work.x, channels_last(4))


def images_of(work: Work) -> int:
    """Return the number of images among the inputs; they come first."""
    return 1 if work.role == "forward" else 2


def make_kernels(work: Work, inputs: Sequence[View], out: View) -> list[Kernel]:
    """Bind the kernels of a convolution or gradient; none if torch computes it or images are not channels last."""
    way = way_of(work, load().kernel_lanes())
    if way is None or way == "gemm" or not all(map(lies_channels_last, inputs[: images_of(work)])):
        return []
    if way == "depthwise":
        return _depthwise(work, inputs, out)
    if work.role == "weight gradient":
        arguments = {"dy": inputs[0], "x": inputs[1], "out": out, "before": work.before}
        sums = Kernel(load(), f"{way}_weight_gradient", arguments)
        return [sums, Kernel(load(), f"{way}_weight_finish", sums)]
    return _winograd(work, way, inputs, out)


def _depthwise(work: Work, inputs: Sequence[View], out: View) -> list[Kernel]:
    images = (out, *inputs) if work.role == "forward" else tuple(inputs)
    views = dict(zip(("y", "x", "weight", "out"), (*images, out), strict=True))
    arguments = {**views, "stride": work.stride, "before": work.before, "dilation": work.dilation}
    if work.role != "weight gradient":
        return [Kernel(load(), f"depthwise_{work.role.replace(' ', '_')}", arguments)]
    sums = Kernel(load(), "depthwise_weight_gradient", arguments)
    return [sums, Kernel(load(), "depthwise_weight_finish", sums)]


def _winograd(work: Work, way: Way, inputs: Sequence[View], out: View) -> list[Kernel]:
    """Bind a transform of the weights, and the convolution of inference that reads them.

    The gradient of the input is the convolution of dy with the weights rotated by 180 degrees.
    """
    is_turned = work.role == "input gradient"
    x, weight = inputs[0], inputs[2 if is_turned else 1]
    bias = inputs[2] if not is_turned and len(inputs) > 2 else None
    points = (int(way[-1]) + 2) ** 2
    transformed = torch.empty(points * prod(work.weight[:2]), dtype=torch.float32)
    shift = torch.zeros(out.shape[1], dtype=torch.float32)
    weights = {
        "weight": weight,
        "bias": bias,
        "out": transformed.data_ptr(),
        "out_bias": shift.data_ptr(),
        "is_turned": is_turned,
    }
    arguments = {
        "x": _exact(x),
        "residual": None,
        "out": _exact(out),
        "weights": transformed.data_ptr(),
        "bias": shift.data_ptr(),
        "before": [2 - padding for padding in work.before] if is_turned else work.before,
        "epilogue": NOTHING,
    }
    kept = transformed, shift
    return [Kernel(load(), f"{way}_weights", weights, *kept), Kernel(native.load(), way, arguments, *kept)]


def _exact(image: View) -> View:
    """Return the image with dense strides for dimensions of size 1 too."""
    return image.reshaped(image.shape, dense(image.shape, channels_last(4)))


@dataclass(frozen=True, slots=True)
class Into:
    """Function of torch for an operator that writes into given memory.

    A call without ``out`` allocates its result.
    """

    shape: Shape
    strides: Strides
    write: Callable[..., Any]  # (out, *inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the result in new memory."""
        out = torch.empty_strided(self.shape, self.strides)
        self.write(out, *inputs)
        return out


def gemm(shape: Shape) -> Into:
    """Return the product of a [M, K] and b [K, N] in float32."""
    return Into(shape, dense(shape, row_major(2)), lambda out, a, b: torch.mm(a, b, out=out))


def pixels(work: Work) -> Into:
    """Return a convolution of single pixels, or a gradient of it, as a GEMM of rows of channels-last images."""

    def rows(image: Tensor) -> Tensor:
        return image.permute(0, 2, 3, 1).reshape(-1, image.shape[1])

    def forward(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        matrix = weight.flatten(1).t()
        if bias is None:
            torch.mm(rows(x), matrix, out=rows(out))
        else:
            torch.addmm(bias, rows(x), matrix, out=rows(out))

    def input_gradient(out: Tensor, dy: Tensor, _x: Tensor, weight: Tensor) -> None:
        torch.mm(rows(dy), weight.flatten(1), out=rows(out))

    def weight_gradient(out: Tensor, dy: Tensor, x: Tensor, _weight: Tensor) -> None:
        torch.mm(rows(dy).t(), rows(x), out=out.flatten(1))

    if work.role == "forward":
        return Into(work.y, strides_of_result(work), forward)
    if work.role == "input gradient":
        return Into(work.x, strides_of_result(work), input_gradient)
    return Into(work.weight, strides_of_result(work), weight_gradient)
