"""Kernels of attention and its gradients in training, for short sequences (native/attention.h)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from mlsys_nimble.backends.cpu.library import Kernel, View
from mlsys_nimble.ir.operators import Aten, Input
from mlsys_nimble.ir.program import Operator
from mlsys_nimble.ir.strides import Strides, dense, order_of, row_major
from mlsys_nimble.training.kernels import load

_FORWARD = "aten._scaled_dot_product_flash_attention_for_cpu.default"
_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
MOST_SCORES = 128 * 1024  # of one head: more do not fit the second-level cache, and torch's blocks are faster


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Attention or its gradients.

    Inputs are q, k, v; of the gradients dout, q, k, v, out, logsumexp. Results: out and logsumexp; or dq, dk, dv.
    """

    is_gradient: bool
    is_causal: bool
    scale: float | None  # None: one over the root of the features


def attention_of(operator: Operator, inputs: Sequence[View]) -> AttentionWork | None:
    """Return the work that kernels can compute: float32, no mask, no dropout, few scores; or None."""
    kind = operator.kind
    if not isinstance(kind, Aten) or kind.target not in (_FORWARD, _BACKWARD):
        return None
    is_gradient = kind.target == _BACKWARD
    count = 6 if is_gradient else 3
    keywords: dict[str, Any] = dict(kind.keywords)
    rest = (*kind.arguments[count:], *((0.0, False)[len(kind.arguments) - count :]))
    if kind.arguments[:count] != tuple(map(Input, range(count))) or len(inputs) != count or len(rest) != 2:
        return None
    q, k, v = inputs[1:4] if is_gradient else inputs
    is_plain = rest[0] == 0.0 and keywords.get("attn_mask") is None and all(view.dtype == "float32" for view in inputs)
    rows = [view for view in inputs if len(view.shape) == 4]
    lies_well = all(view.strides[3] == 1 for view in rows) and q.shape[3] == v.shape[3]
    fits = 0 < q.shape[2] * k.shape[2] <= MOST_SCORES and q.shape[:2] == k.shape[:2]
    if not (is_plain and lies_well and fits) or q.shape[3] % load().kernel_lanes():
        return None
    return AttentionWork(is_gradient, bool(rest[1]), keywords.get("scale"))


def strides_of_results(work: AttentionWork, inputs: Sequence[View]) -> list[Strides]:
    """Return dense strides in the order of q's, so that heads split from one row are joined without a copy."""
    q, k, v = inputs[1:4] if work.is_gradient else inputs
    if work.is_gradient:
        return [dense(view.shape, order_of(q.shape, q.strides)) for view in (q, k, v)]
    return [dense(q.shape, order_of(q.shape, q.strides)), dense(q.shape[:3], row_major(3))]


def make_kernels(work: AttentionWork, inputs: Sequence[View], outputs: Sequence[View]) -> list[Kernel]:
    """Bind the kernel; :class:`AttentionWork` lists inputs and outputs."""
    q, k, v = inputs[1:4] if work.is_gradient else inputs
    assert prod(q.shape)
    out, logsumexp = inputs[4:] if work.is_gradient else outputs
    dout, gradients = (inputs[0], outputs) if work.is_gradient else (None, (None, None, None))
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "logsumexp": logsumexp,
        "dout": dout,
        **dict(zip(("dq", "dk", "dv"), gradients, strict=True)),
        "scale": q.shape[3] ** -0.5 if work.scale is None else work.scale,
        "is_causal": work.is_causal,
    }
    return [Kernel(load(), "attention_backward" if work.is_gradient else "attention_forward", arguments)]
