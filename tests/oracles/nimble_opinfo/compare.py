"""Equal within rounding: the tolerance of the oracles of Nimble."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

RELATIVE = {  # of an element, or of the largest of a result: sums run in another order, functions round otherwise
    torch.float64: 1e-7,
    torch.complex128: 1e-7,
    torch.float32: 2e-5,
    torch.complex64: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}


def compare(actual: Iterable[Any], expected: Iterable[Any], *, values: bool = True, scale: float = 1.0) -> str:
    """Say what differs: shapes, dtypes, numbers, bits of integers; "" where nothing does.

    Args:
        actual: Tensors and plain values.
        expected: The same from eager.
        values: False compares shapes and dtypes alone.
        scale: Times the tolerance.
    """
    actual, expected = list(actual), list(expected)
    if len(actual) != len(expected):
        return f"{len(actual)} results, not {len(expected)}"
    for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        if not isinstance(theirs, torch.Tensor):
            if ours != theirs == theirs:
                return f"result {number} is {ours!r}, not {theirs!r}"
            continue
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            return f"result {number} is {ours.dtype}{list(ours.shape)}, not {theirs.dtype}{list(theirs.shape)}"
        if values and (difference := _difference(ours.detach(), theirs.detach(), scale)):
            return f"result {number}: {difference}"
    return ""


def _difference(ours: torch.Tensor, theirs: torch.Tensor, scale: float) -> str:
    if theirs.layout is not torch.strided:
        ours, theirs = ours.to_dense(), theirs.to_dense()
    tolerance = RELATIVE.get(theirs.dtype, 0.0) * scale
    if not theirs.numel() or torch.equal(ours, theirs):
        return ""
    if not tolerance:
        return f"{int((ours != theirs).sum())} of {theirs.numel()} elements differ"
    finite = theirs[torch.isfinite(theirs)].abs()
    largest = float(finite.max()) if finite.numel() else 1.0
    if scale > 1:  # gradients, of results weighted by about 1: terms may cancel
        largest = max(largest, 0.01)
    try:
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * largest, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())[:200]
    return ""
