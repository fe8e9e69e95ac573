"""The kernels as compiled for each level that this machine executes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from mlsys_core.native.loader import builds_to_test, compiled_with
from mlsys_nimble.backends.cpu import library
from mlsys_nimble.backends.cpu.library import Kernel
from torch import Tensor

BUILDS = builds_to_test()


@pytest.fixture(scope="module", params=BUILDS)
def native(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Compile the kernels for one level; the library of most of them."""
    with compiled_with(BUILDS[request.param], library.load, library.load_bf16, library.load_int8):
        yield library.load()


def in_pieces(kernel: Kernel, out: Tensor) -> Tensor:
    """Return what ``kernel`` writes to ``out``; check that it is the same however its units are cut."""
    before = out.clone()
    kernel.run()
    whole = out.clone()
    out.copy_(before)
    cuts = sorted({0, 1, kernel.units // 3, kernel.units // 2, kernel.units - 1, kernel.units})
    for begin, end in reversed(list(pairwise(cuts))):
        kernel.run(begin, end)
    assert torch.equal(whole, out), "another cut, other bits"
    return out


def error_of(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the scale of the result."""
    assert actual.shape == expected.shape
    if not expected.numel():
        return 0.0
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30))
