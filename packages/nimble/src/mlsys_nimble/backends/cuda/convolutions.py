"""Convolutions on a GPU: library and image layout by measurement (the paper's kernel selection, 3.4).

The library is chosen for each convolution: cuDNN, which tries its own algorithms in the pre-run, or torch's native
kernels. The layout, row by row or channels last, is chosen for a whole schedule, since a change of layout between two
operators costs a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from mlsys_nimble.backends.table import Run
from mlsys_nimble.ir.operators import Convolution
from mlsys_nimble.ir.program import Program
from torch import Tensor

LAYOUTS = ("row by row", "channels last")
WORTH = 0.98  # another choice than the first must take at most this part of its time


def fastest(seconds: Mapping[str, float]) -> str:
    """Return the first name, or the fastest if it wins by more than the measurement noise.

    Example:
        >>> fastest({"cudnn": 1.0, "native": 0.99}), fastest({"cudnn": 1.0, "native": 0.5})
        ('cudnn', 'native')
    """
    first = next(iter(seconds))
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] <= WORTH * seconds[first] else first


class SelectedConvolution:
    """Convolution with several implementations; it uses the first until :meth:`select` has measured them.

    Args:
        run: Reference implementation.
        has_constant_weight: True if the weight never changes, so that it is converted to the layout only once.
        layout: Layout of images, one of :data:`LAYOUTS`.
    """

    def __init__(self, run: Run, *, has_constant_weight: bool, layout: str) -> None:
        laid_out = _channels_last(run, has_constant_weight) if layout == "channels last" else run
        self.ways: dict[str, Run] = {"cudnn": laid_out, "native": _without_cudnn(laid_out)}
        self.way = "cudnn"

    def __call__(self, *tensors: Tensor) -> Any:
        """Run the convolution by the chosen implementation."""
        return self.ways[self.way](*tensors)

    def select(self, measure: Callable[[Callable[[], Any]], float], tensors: Sequence[Tensor]) -> None:
        """Choose the fastest implementation by ``measure``, which returns the seconds of a call."""
        self.way = fastest({name: measure(partial(run, *tensors)) for name, run in self.ways.items()})


def layouts_of(program: Program) -> tuple[str, ...]:
    """Return the layouts worth measuring: one where there is no convolution over images."""
    has_images = any(
        isinstance(operator.kind, Convolution) and len(program.values[operator.inputs[0]].shape) == 4
        for operator in program.operators
    )
    return LAYOUTS if has_images else LAYOUTS[:1]


def _channels_last(run: Run, has_constant_weight: bool) -> Run:
    kept: list[Tensor] = []  # the weight in the layout, made by the first call, which is not captured

    def run_laid_out(x: Tensor, weight: Tensor, *rest: Tensor) -> Any:
        if x.dim() != 4:
            return run(x, weight, *rest)
        if has_constant_weight and not kept:
            kept.append(weight.contiguous(memory_format=torch.channels_last))
        laid_out = kept[0] if kept else weight.contiguous(memory_format=torch.channels_last)
        return run(x.contiguous(memory_format=torch.channels_last), laid_out, *rest)

    return run_laid_out


def _without_cudnn(run: Run) -> Run:
    def run_native(*tensors: Tensor) -> Any:
        with _cudnn(enabled=False):
            return run(*tensors)

    return run_native


@contextmanager
def _cudnn(*, enabled: bool) -> Iterator[None]:
    cudnn = torch.backends.cudnn
    before, cudnn.enabled = cudnn.enabled, enabled
    try:
        yield
    finally:
        cudnn.enabled = before
