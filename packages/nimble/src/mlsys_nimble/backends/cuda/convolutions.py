"""Convolutions on a GPU: who computes each, and how images lie, by measurement (the paper's kernel selection, 3.4).

Who: cuDNN, which tries its own algorithms in the pre-run, or torch's native kernels, each convolution by itself. How:
row by row or channels last, for a whole schedule, since a layout that changes between two operators costs a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from mlsys_nimble.backends.reference.operators import Run
from mlsys_nimble.ir.operators import Convolution
from mlsys_nimble.ir.program import Program
from torch import Tensor

LAYOUTS = ("row by row", "channels last")
WORTH = 0.98  # another than the first choice is taken if it takes at most this part of its time


def fastest(seconds: Mapping[str, float]) -> str:
    """The first name, or the one that is faster by more than measurements wander.

    Example:
        >>> fastest({"cudnn": 1.0, "native": 0.99}), fastest({"cudnn": 1.0, "native": 0.5})
        ('cudnn', 'native')
    """
    first = next(iter(seconds))
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] <= WORTH * seconds[first] else first


class SelectedConvolution:
    """A convolution with several ways to compute it, the first of them until :meth:`select` has measured.

    Args:
        run: By its meaning in ``reference.py``.
        has_constant_weight: Whether the weight never changes, so that it need be laid out only once.
        layout: One of :data:`LAYOUTS`.
    """

    def __init__(self, run: Run, *, has_constant_weight: bool, layout: str) -> None:
        laid_out = _channels_last(run, has_constant_weight) if layout == "channels last" else run
        self.ways: dict[str, Run] = {"cudnn": laid_out, "native": _without_cudnn(laid_out)}
        self.way = "cudnn"

    def __call__(self, *tensors: Tensor) -> Any:
        """The convolution, in the way chosen."""
        return self.ways[self.way](*tensors)

    def select(self, measure: Callable[[Callable[[], Any]], float], tensors: Sequence[Tensor]) -> None:
        """Choose by ``measure``, which gives seconds of a call."""
        self.way = fastest({name: measure(partial(run, *tensors)) for name, run in self.ways.items()})


def layouts_of(program: Program) -> tuple[str, ...]:
    """The layouts worth measuring: one where there is no convolution over images."""
    has_images = any(
        isinstance(operator.kind, Convolution) and len(program.values[operator.inputs[0]].shape) == 4
        for operator in program.operators
    )
    return LAYOUTS if has_images else LAYOUTS[:1]


def _channels_last(run: Run, has_constant_weight: bool) -> Run:
    kept: list[Tensor] = []  # the weight, laid out by the first call, which is no captured one

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
