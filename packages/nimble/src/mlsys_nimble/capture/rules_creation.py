"""Tensors filled with a value; those that depend on shapes alone fold."""

from __future__ import annotations

from typing import Any

from mlsys_nimble.capture.builder import Builder, Ref
from mlsys_nimble.capture.rules import rule
from mlsys_nimble.ir.program import ValueType


@rule("aten.zeros_like", "aten.new_zeros", "aten.empty_like", "aten.new_empty", "aten.empty.memory_format", "aten.zero")
def _zeros(b: Builder, result: ValueType, *args: Any, **kwargs: Any) -> Ref:
    return b.full(result, 0)


@rule("aten.ones_like", "aten.new_ones")
def _ones(b: Builder, result: ValueType, *args: Any, **kwargs: Any) -> Ref:
    return b.full(result, 1)


@rule("aten.full_like", "aten.fill.Scalar")
def _full_like(b: Builder, result: ValueType, x: Ref, value: Any, **kwargs: Any) -> Ref:
    return b.full(result, value)


@rule("aten.new_full")
def _new_full(b: Builder, result: ValueType, x: Ref, size: Any, value: Any, **kwargs: Any) -> Ref:
    return b.full(result, value)


@rule("aten.fill.Tensor")
def _fill(b: Builder, result: ValueType, x: Ref, value: Ref) -> Ref:
    return b.expand(b.cast(value, result.dtype), result.shape)
