"""ATen operators that torch's ONNX exporter lacks or gets wrong, written in ONNX's own operators.

Imported by ``onnx.py`` only when there is something to export: it needs onnxscript.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import opset18 as op  # type: ignore[import-not-found,unused-ignore]

INT64 = 7  # onnx.TensorProto.INT64


def searchsorted(
    sorted_sequence: Any,
    self: Any,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """How many of the sequence are below each value (``right``: not above it); NaN comes after all."""
    assert sorter is None
    assert not out_int32
    edges, values = op.Unsqueeze(sorted_sequence, [-2]), op.Unsqueeze(self, [-1])
    below = op.LessOrEqual(edges, values) if right or side == "right" else op.Less(edges, values)
    everywhere = op.Or(below, op.IsNaN(values))
    return op.ReduceSum(op.Cast(everywhere, to=INT64), [-1], keepdims=0)


def repeat_interleave(self: Any, repeats: Any, dim: int | None = None, output_size: Any = None) -> Any:  # noqa: ARG001
    """Each element of a flat tensor, ``repeats`` times in turn."""
    assert dim in (None, 0)
    times = op.Constant(value_ints=[repeats]) if isinstance(repeats, int) else op.Reshape(repeats, [1])
    shape = op.Concat(op.Constant(value_ints=[1]), times, axis=0)
    table = op.Expand(op.Unsqueeze(op.Reshape(self, [-1]), [1]), shape)
    return op.Reshape(table, [-1])


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.searchsorted.Tensor: searchsorted,
    torch.ops.aten.repeat_interleave.self_int: repeat_interleave,
}
