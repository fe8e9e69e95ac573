"""Reductions over dimensions."""

from __future__ import annotations

from typing import Any

from mlsys_nimble.capture.builder import Builder, Ref
from mlsys_nimble.capture.rules import Rule, rule
from mlsys_nimble.ir.operators import Reduce
from mlsys_nimble.ir.program import ValueType


def reduce(b: Builder, result: ValueType, op: Any, x: Ref, dims: Any = None, keeps_dims: bool = False) -> Any:
    """Emit one reduction in the result's dtype, over all dimensions where ``dims`` names none."""
    if isinstance(dims, int):
        dims = (dims,)
    chosen = tuple(sorted({dim % x.rank for dim in dims} if dims else range(x.rank))) if x.rank else ()
    if x.type.numel == 0 or x.dtype.startswith("complex") or not chosen:
        return NotImplemented
    return b.emit(Reduce(op, chosen, keeps_dims), [b.cast(x, result.dtype)], result)


def _with_dtype(op: str) -> Rule:
    return lambda b, result, x, dims=None, keepdim=False, dtype=None: reduce(b, result, op, x, dims, keepdim)


def _without_dtype(op: str) -> Rule:
    return lambda b, result, x, dims=None, keepdim=False: reduce(b, result, op, x, dims, keepdim)


rule("aten.sum.default", "aten.sum.dim_IntList")(_with_dtype("sum"))
rule("aten.mean.default", "aten.mean.dim")(_with_dtype("mean"))
rule("aten.amax", "aten.max.default")(_without_dtype("max"))
rule("aten.amin", "aten.min.default")(_without_dtype("min"))


@rule("aten.linalg_vector_norm", "aten.norm.ScalarOpt_dim")
def _vector_norm(
    b: Builder, result: ValueType, x: Ref, order: Any = 2, dims: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    if order not in (None, 2) or x.dtype != result.dtype:
        return NotImplemented
    is_short = x.dtype in ("float16", "bfloat16")  # whose squares may not fit in them: torch sums in float32
    wide = ValueType(result.shape, "float32") if is_short else result
    total = reduce(b, wide, "sum", b.pointwise("square", b.cast(x, wide.dtype)), dims, keepdim)
    return b.cast(b.pointwise("sqrt", total), result.dtype) if total is not NotImplemented else NotImplemented
