"""Elementwise chains compiled from the kernels that :mod:`.triton_printer` prints."""

from __future__ import annotations

import hashlib
import linecache
from functools import cache
from math import prod
from typing import Any

import torch
from mlsys_nimble.backends.cpu.library import View
from mlsys_nimble.backends.cpu.loops import broadcast, merged
from mlsys_nimble.backends.cuda.triton_printer import Window, can_print, print_kernel
from mlsys_nimble.backends.table import Run
from mlsys_nimble.ir.operators import Pointwise
from mlsys_nimble.ir.program import ValueType
from mlsys_nimble.ir.strides import dense, order_of, row_major
from torch import Tensor

BLOCK = 1024  # elements of a program
_FLOATS = ("float32", "float16", "bfloat16", "float64")


def make_pointwise(kind: Pointwise, inputs: tuple[ValueType, ...], result: ValueType) -> Run | None:
    """Return a function from the input tensors to the result; None if torch must run the steps."""
    types = (*inputs, result)
    if not can_print(kind) or result.numel == 0 or any(type_.dtype not in (*_FLOATS, "bool") for type_ in types):
        return None
    dtype: torch.dtype = getattr(torch, result.dtype)
    known: dict[tuple[tuple[int, ...], ...], tuple[Any, tuple[int, ...]]] = {}  # by strides: kernel, the result's

    def run(*tensors: Tensor) -> Tensor:
        strides = tuple([tensor.stride() for tensor in tensors])
        found = known.get(strides)
        if found is None:
            found = known[strides] = _compile(kind, tensors, result)
        kernel, out_strides = found
        out = torch.empty_strided(result.shape, out_strides, dtype=dtype, device=tensors[0].device)
        kernel[(-(-result.numel // BLOCK),)](*tensors, out, BLOCK=BLOCK)
        return out

    return run if inputs else None


def _compile(kind: Pointwise, tensors: tuple[Tensor, ...], result: ValueType) -> tuple[Any, tuple[int, ...]]:
    """Return the kernel for tensors of these strides, and the result's: those of the first dense input of its shape."""
    views = [View.of(tensor) for tensor in tensors]
    strides = dense(result.shape, row_major(len(result.shape)))
    for view in views:
        if view.shape == result.shape and view.strides == dense(view.shape, order_of(view.shape, view.strides)):
            strides = view.strides
            break
    out = View(0, result.dtype, result.shape, strides)
    *merged_views, merged_out = merged([*(broadcast(view, out.shape) for view in views), out])
    windows = [Window(view.dtype, merged_out.shape, view.strides) for view in merged_views]
    source = print_kernel(kind, windows, Window(out.dtype, merged_out.shape, merged_out.strides))
    assert prod(merged_out.shape) == result.numel
    return _load(source), strides


@cache
def _load(source: str) -> Any:
    """Load the kernel of a printed module; triton reads its source from ``linecache``."""
    name = f"<nimble {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": name}
    exec(compile(source, name, "exec"), namespace)
    return namespace["kernel"]
