"""ATen operators that torch's ONNX exporter lacks or gets wrong, written in ONNX's own operators.

Imported by ``onnx.py`` only when there is something to export: it needs onnxscript.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir
import onnxscript
import torch

op: Any = onnxscript.opset18  # its types are of ONNX's tensors; while it traces it takes Python's numbers too
FLOAT, INT64, DOUBLE = 1, 7, 11  # of onnx.TensorProto


def searchsorted(
    sorted_sequence: Any,
    self: Any,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """Count the entries of the sequence below each value (``right``: not above it); NaN comes after all."""
    assert sorter is None
    assert not out_int32
    edges, values = op.Unsqueeze(sorted_sequence, [-2]), op.Unsqueeze(self, [-1])
    below = op.LessOrEqual(edges, values) if right or side == "right" else op.Less(edges, values)
    everywhere = op.Or(below, op.IsNaN(values))
    return op.ReduceSum(op.Cast(everywhere, to=INT64), [-1], keepdims=0)


def repeat_interleave(self: Any, repeats: Any, dim: int | None = None, output_size: Any = None) -> Any:  # noqa: ARG001
    """Repeat each element of a flat tensor, ``repeats`` times in turn."""
    assert dim in (None, 0)
    times = op.Constant(value_ints=[repeats]) if isinstance(repeats, int) else op.Reshape(repeats, [1])
    shape = op.Concat(op.Constant(value_ints=[1]), times, axis=0)
    table = op.Expand(op.Unsqueeze(op.Reshape(self, [-1]), [1]), shape)
    return op.Reshape(table, [-1])


def sort_stable(self: Any, *, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:  # noqa: ARG001
    """Return sorted values and their indices; ONNX's TopK puts equals in their order, so it is stable."""
    length = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
    return op.TopK(self, length, axis=dim, largest=int(descending), sorted=1)


def cdist(x1: Any, x2: Any, p: float = 2.0, compute_mode: int | None = None) -> Any:  # noqa: ARG001
    """Compute distances ``[..., rows of x1, rows of x2]`` of order ``p``."""
    apart = op.Abs(op.Sub(op.Unsqueeze(x1, [-2]), op.Unsqueeze(x2, [-3])))
    if p == 1:
        return op.ReduceSum(apart, [-1], keepdims=0)
    if p == float("inf"):
        return op.ReduceMax(apart, [-1], keepdims=0)
    if p == 2:
        return op.Sqrt(op.ReduceSum(op.Mul(apart, apart), [-1], keepdims=0))
    order = op.CastLike(op.Constant(value_float=p), apart)
    return op.Pow(op.ReduceSum(op.Pow(apart, order), [-1], keepdims=0), op.Reciprocal(order))


def scalar_tensor(s: Any, dtype: int = FLOAT, **_: Any) -> Any:
    """Return a number as a tensor, exactly: torch's own translation rounds it to float32 on the way to float64."""
    if not isinstance(s, bool | int | float):
        return op.Cast(s, to=dtype)
    if dtype != DOUBLE:
        return op.Cast(op.Constant(value_int=s) if isinstance(s, int) else op.Constant(value_float=s), to=dtype)
    return op.Constant(value=onnx_ir.tensor(np.array(s, np.float64)))


def erf(self: Any) -> Any:
    """Compute the error function by Gauss and Legendre's quadrature: runtimes have ``Erf`` for float32 alone.

    ``erf(z) = 2 z / sqrt(pi)`` times the integral of ``exp(-z^2 t^2)`` for t from 0 to 1; beyond 6 it is 1 to the last
    bit.
    """
    nodes, weights = np.polynomial.legendre.leggauss(64)

    def constant(values: Any) -> Any:
        return op.CastLike(op.Constant(value=onnx_ir.tensor(np.asarray(values, np.float64))), self)

    z = op.Clip(self, constant(-6.0), constant(6.0))
    squares = op.Mul(op.Unsqueeze(op.Mul(z, z), [-1]), constant(((nodes + 1) / 2) ** 2))
    integral = op.ReduceSum(op.Mul(op.Exp(op.Neg(squares)), constant(weights / 2)), [-1], keepdims=0)
    return op.Mul(op.Mul(z, integral), constant(2 / math.sqrt(math.pi)))


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.searchsorted.Tensor: searchsorted,
    torch.ops.aten.repeat_interleave.self_int: repeat_interleave,
    torch.ops.aten.scalar_tensor.default: scalar_tensor,
    torch.ops.aten.sort.stable: sort_stable,
    torch.ops.aten._cdist_forward.default: cdist,
    torch.ops.aten.erf.default: erf,
}
