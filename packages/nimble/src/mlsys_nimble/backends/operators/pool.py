"""Pools (pool.h)."""

from __future__ import annotations

from typing import Any

import torch
from mlsys_nimble.backends.cpu import integers
from mlsys_nimble.backends.cpu.library import SPACE, Kernel, View, load
from mlsys_nimble.backends.cpu.loops import image, window
from mlsys_nimble.backends.reference.pointwise import with_epilogue
from mlsys_nimble.backends.table import FLOAT32, Call, Family, Run, dtype_of
from mlsys_nimble.ir import operators as kinds
from mlsys_nimble.ir.program import ValueType
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

FAMILY = Family()


@FAMILY.meaning(kinds.Pool)
def _pool(kind: kinds.Pool, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    index = len(kind.kernel) - 1
    around = [amount for pair in reversed(kind.padding) for amount in pair]
    symmetric = all(
        0 <= before == after <= size // 2 for (before, after), size in zip(kind.padding, kind.kernel, strict=True)
    )
    padding = tuple(before for before, _ in kind.padding) if symmetric else 0
    pool: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[index]
    average: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[index]
    shares = None
    if kind.op == "average" and not symmetric and not kind.counts_padding:
        ones = torch.ones((1, 1, *inputs[0].shape[2:]), dtype=dtype_of(result))
        shares = average(F.pad(ones, around), kind.kernel, kind.stride)  # share of each window that is not padding
    shares_on: dict[torch.device, Tensor] = {}  # by device; filled by the first call, as a capture allows no copy

    def run_max(x: Tensor) -> Tensor:
        x = x if symmetric else F.pad(x, around, value=float("-inf"))
        return pool(x, kind.kernel, kind.stride, padding, kind.dilation)  # type: ignore[no-any-return]

    def run_average(x: Tensor) -> Tensor:
        if symmetric:
            return average(x, kind.kernel, kind.stride, padding, False, kind.counts_padding)  # type: ignore[no-any-return]
        y: Tensor = average(F.pad(x, around), kind.kernel, kind.stride)
        if shares is None:
            return y
        if y.device not in shares_on:
            shares_on[y.device] = shares.to(y.device)
        return y / shares_on[y.device]

    if result.dtype == "uint8":  # torch has none of bytes
        return lambda x: run_max(x.float()).to(torch.uint8)
    return with_epilogue(kind.epilogue, run_max if kind.op == "max" else run_average)


@FAMILY.lowering(kinds.Pool, dtypes=FLOAT32 | {"uint8"})
def _lower_pool(call: Call) -> Kernel | None:
    if len(call.out.shape) > SPACE + 2:
        return None
    if call.out.dtype == "uint8":
        is_maximum = call.kind.op == "max" and call.kind.epilogue == kinds.NOTHING
        return integers.codes_pool(call.kind, call.inputs[0], call.out) if is_maximum else None
    return pool(
        call.kind, call.inputs[0], call.out, residual=call.inputs[-1] if call.kind.epilogue.has_residual else None
    )


def pool(kind: kinds.Pool, x: View, out: View, *, residual: View | None = None) -> Kernel:
    """Bind a pool of x [N, C, *space] to out and residual [N, C, *space'], channels side by side."""
    assert all(view is None or view.shape[1] == 1 or view.strides[1] == 1 for view in (x, out, residual))
    arguments = {
        "x": image(x),
        "residual": image(residual),
        "out": image(out),
        **window(kind, kind.kernel),
        "is_average": kind.op == "average",
        "counts_padding": kind.counts_padding,
        "epilogue": kind.epilogue,
    }
    return Kernel(load(), "pool", arguments)
