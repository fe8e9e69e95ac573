"""Kernels of layer norm and its gradients in training (native/layer_norm.h)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from mlsys_nimble.backends.cpu import loops
from mlsys_nimble.backends.cpu.library import Kernel, View
from mlsys_nimble.ir.operators import Aten, Input
from mlsys_nimble.ir.program import Operator
from mlsys_nimble.ir.strides import Strides, dense, order_of, row_major
from mlsys_nimble.training.kernels import load

_FORWARD = "aten.native_layer_norm.default"
_BACKWARD = "aten.native_layer_norm_backward.default"

_VIEWS = ("x", "y", "mean", "rstd", "dy", "weight", "bias", "dweight", "dbias")


def strides_of_results(operator: Operator, inputs: Sequence[View]) -> list[Strides] | None:
    """Return the strides of the results if kernels make them, in the order of x's; None: torch runs it.

    Kernels take float32 rows of whole vectors with weight and bias, and all three gradients. Statistics are row-major.
    """
    kind = operator.kind
    if not isinstance(kind, Aten) or kind.target not in (_FORWARD, _BACKWARD) or kind.keywords:
        return None
    is_gradient = kind.target == _BACKWARD
    if len(inputs) != (6 if is_gradient else 3):  # without weight or bias
        return None
    x, weight = inputs[is_gradient], inputs[4 if is_gradient else 1]
    wanted = (Input(0), Input(1), x.shape[-1:], *map(Input, range(2, 6)), (True, True, True))
    if kind.arguments[:-1] != (Input(0), x.shape[-1:], Input(1), Input(2)) and kind.arguments != wanted:
        return None
    if any(view.dtype != "float32" or 0 in view.shape for view in inputs) or x.shape[-1] % load().kernel_lanes():
        return None
    rows = [view for view in inputs if view.shape == x.shape]
    if weight.shape != x.shape[-1:] or any(view.strides[-1] != 1 for view in (*rows, weight, inputs[-1])):
        return None
    order = (*order_of(x.shape[:-1], x.strides[:-1]), len(x.shape) - 1)
    strides, width = dense(x.shape, order), x.shape[-1:]
    if is_gradient:
        return [strides, dense(width, (0,)), dense(width, (0,))]
    statistics = dense((*x.shape[:-1], 1), row_major(len(x.shape)))
    return [strides, statistics, statistics]


def make_kernels(operator: Operator, inputs: Sequence[View], outputs: Sequence[View]) -> list[Kernel]:
    """Bind the kernels of an operator that :func:`strides_of_results` takes."""
    kind = operator.kind
    assert isinstance(kind, Aten)
    if kind.target == _FORWARD:
        x, weight, bias = inputs
        y, mean, rstd = outputs
        rows = _rows([x, mean, rstd, y])
        views = {"x": rows[0], "mean": rows[1], "rstd": rows[2], "y": rows[3], "weight": weight, "bias": bias}
        return [Kernel(load(), "layer_norm_forward", _arguments(views, x, kind.arguments[-1]))]
    dy, x, mean, rstd, weight, _ = inputs
    dx, dweight, dbias = outputs
    rows = _rows([dy, x, mean, rstd, dx])
    views = dict(zip(("dy", "x", "mean", "rstd", "y"), rows, strict=True))
    views |= {"weight": weight, "dweight": dweight, "dbias": dbias}
    sums = Kernel(load(), "layer_norm_backward", _arguments(views, x, 0.0))
    return [sums, Kernel(load(), "layer_norm_finish", sums)]


def _rows(views: Sequence[View]) -> list[View]:
    """Return views of the rows' first elements, ordered like the last view."""
    assert prod(views[0].shape)
    return loops.merged([view.reshaped(view.shape[:-1], view.strides[:-1]) for view in views])


def _arguments(views: dict[str, View], x: View, eps: float) -> dict[str, Any]:
    return {**{name: views.get(name) for name in _VIEWS}, "width": x.shape[-1], "eps": eps}
