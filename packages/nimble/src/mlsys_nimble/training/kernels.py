"""Bindings of training's kernels (native/training.cpp), and sequences of any kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_void_p
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from mlsys_core.native import Kernel as Source
from mlsys_core.native import bind, expect

from mlsys_nimble.backends.cpu.library import DTYPES, MAX_RANK, Kernel, View
from mlsys_nimble.ir.operators import BatchNormTraining
from mlsys_nimble.ir.strides import channels_last, dense
from mlsys_nimble.state.forks import renew_in_forks

_HERE = Path(__file__).parent / "native"
_HEADERS = (*sorted(_HERE.glob("*.h")), *sorted((_HERE.parents[1] / "backends" / "cpu").glob("*.h")))
TRAINING = Source(_HERE / "training.cpp", headers=_HEADERS, compile_s=5)


@cache
def load() -> Any:
    """Load the library; without the wheel's, the first call ever compiles it for this machine.

    Raises:
        MissingDependencyError: there is no C++ compiler.
    """
    library = bind(TRAINING.load())
    expect(library, MAX_RANK=MAX_RANK, Dtype=DTYPES)
    return library


class KernelList:
    """Kernels that run in order, each on all threads of torch's pool."""

    def __init__(self, kernels: Sequence[Kernel], num_threads: int) -> None:
        self.kernels = tuple(kernels)
        step = -(-max((kernel.scratch_nbytes for kernel in kernels), default=0) // 64) * 64 + 64
        self._scratch = torch.empty(step * num_threads + 64, dtype=torch.uint8)
        first = -(-self._scratch.data_ptr() // 64) * 64
        self._addresses = (c_void_p * max(len(kernels), 1))(*(kernel.address for kernel in kernels))
        self._arguments = ctypes.addressof(self._addresses), len(kernels), num_threads, first, step
        self._run = load().training_run
        renew_in_forks(self)

    def renew(self) -> None:
        """Use one thread in a forked child, which has no threads of torch's pool."""
        addresses, count, _, first, step = self._arguments
        self._arguments = addresses, count, 1, first, step

    def run(self) -> None:
        """Run all; the interpreter's lock is released meanwhile."""
        self._run(*self._arguments)


def lies_channels_last(view: View) -> bool:
    """Return whether pixels of an image, or rows of a matrix, are dense with channels side by side."""
    wanted = dense(view.shape, channels_last(len(view.shape)))
    return all(
        size == 1 or stride == exact for size, stride, exact in zip(view.shape, view.strides, wanted, strict=True)
    )


def takes(view: View) -> bool:
    """Return whether a batch norm's kernels take an image: float32, dense, channels last in whole vectors."""
    return (
        view.dtype == "float32"
        and len(view.shape) >= 2
        and 0 not in view.shape
        and prod(view.shape) > view.shape[1]
        and lies_channels_last(view)
        and view.shape[1] % load().kernel_lanes() == 0
    )


def _rows(view: View) -> View:
    """View a channels-last image as rows of channels."""
    channels = view.shape[1]
    return view.reshaped((prod(view.shape) // channels, channels), (channels, 1))


def batch_norm(kind: BatchNormTraining, inputs: Sequence[View], outputs: Sequence[View]) -> list[Kernel]:
    """Bind a :class:`~mlsys_nimble.ir.operators.BatchNormTraining` to its inputs and outputs."""
    x, weight, bias, running_mean, running_var, *residual = inputs
    y, *statistics = outputs
    arguments = {
        "x": _rows(x),
        "y": _rows(y),
        "weight": weight,
        "bias": bias,
        "running_mean": running_mean,
        "running_var": running_var,
        "residual": _rows(residual[0]) if residual else None,
        **dict(zip(("mean", "rstd", "new_mean", "new_var"), statistics, strict=True)),
        "eps": kind.eps,
        "momentum": kind.momentum,
        "is_relu": kind.epilogue.activation == "relu",
    }
    measure = Kernel(load(), "batch_norm_statistics", arguments)
    finish = Kernel(load(), "batch_norm_finish", measure)
    return [measure, finish, Kernel(load(), "batch_norm_apply", arguments)]


def batch_norm_gradient(inputs: Sequence[View], outputs: Sequence[View]) -> list[Kernel]:
    """Bind a :class:`~mlsys_nimble.ir.operators.BatchNormGradient` to its inputs and outputs."""
    dy, x, weight, mean, rstd = inputs
    dx, dweight, dbias = outputs
    arguments = {
        "dy": _rows(dy),
        "x": _rows(x),
        "dx": _rows(dx),
        "weight": weight,
        "mean": mean,
        "rstd": rstd,
        "dweight": dweight,
        "dbias": dbias,
    }
    sums = Kernel(load(), "batch_norm_gradient_sums", arguments)
    finish = Kernel(load(), "batch_norm_gradient_finish", sums)
    return [sums, finish, Kernel(load(), "batch_norm_gradient_apply", sums)]
