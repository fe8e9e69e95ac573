"""Bindings of training's kernels (native/training.cpp), and sequences of any kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from mlsys_core.config import settings
from mlsys_core.native import load_kernel

from mlsys_nimble.backends.cpu.library import Kernel, View, ViewStruct, view_struct
from mlsys_nimble.ir.operators import BatchNormTraining
from mlsys_nimble.ir.strides import channels_last, dense
from mlsys_nimble.state.forks import renew_in_forks

_MAKERS = (
    *("batch_norm_statistics", "batch_norm_finish", "batch_norm_apply"),
    *("batch_norm_gradient_sums", "batch_norm_gradient_finish", "batch_norm_gradient_apply"),
    *("depthwise_forward", "depthwise_input_gradient", "depthwise_weight_gradient", "depthwise_weight_finish"),
    *("winograd2_weights", "winograd2_weight_gradient", "winograd2_weight_finish"),
    *("attention_forward", "attention_backward"),
    *("product", "weight_gradient", "layer_norm_forward", "layer_norm_backward", "layer_norm_finish"),
    *("winograd4_weights", "winograd4_weight_gradient", "winograd4_weight_finish"),
)


class BatchNormStruct(Structure):
    """batch_norm.h: BatchNorm."""

    _fields_ = [
        *((name, ViewStruct) for name in ("x", "y", "weight", "bias", "running_mean", "running_var", "residual")),
        *((name, ViewStruct) for name in ("mean", "rstd", "new_mean", "new_var")),
        ("eps", c_float),
        ("momentum", c_float),
        ("is_relu", c_int32),
    ]


class BatchNormGradientStruct(Structure):
    """batch_norm.h: BatchNormGradient."""

    _fields_ = [(name, ViewStruct) for name in ("dy", "x", "dx", "weight", "mean", "rstd", "dweight", "dbias")]


class Of(Structure):
    """Argument of a kernel that is made from another."""

    _fields_ = [("kernel", c_void_p)]


@cache
def load() -> Any:
    """Load the library, compiled for this machine on the first call ever.

    Raises:
        MissingDependencyError: there is no C++ compiler.
    """
    here = Path(__file__).parent / "native"
    headers = [*sorted(here.glob("*.h")), *sorted((here.parents[1] / "backends" / "cpu").glob("*.h"))]
    library = load_kernel(here / "training.cpp", cache_dir=settings().cache_dir, headers=headers)
    library.kernel_units.argtypes = library.kernel_scratch.argtypes = library.kernel_free.argtypes = [c_void_p]
    library.kernel_units.restype = library.kernel_scratch.restype = c_int64
    library.training_run.argtypes = [c_void_p, c_int64, c_int64, c_void_p, c_int64]
    for name in _MAKERS:
        make = getattr(library, f"make_{name}")
        make.restype, make.argtypes = c_void_p, [c_void_p]
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
        and view.shape[1] % load().training_lanes() == 0
    )


def _rows(view: View) -> View:
    """View a channels-last image as rows of channels."""
    channels = view.shape[1]
    return view.reshaped((prod(view.shape) // channels, channels), (channels, 1))


def batch_norm(kind: BatchNormTraining, inputs: Sequence[View], outputs: Sequence[View]) -> list[Kernel]:
    """Bind a :class:`~mlsys_nimble.ir.operators.BatchNormTraining` to its inputs and outputs."""
    x, weight, bias, running_mean, running_var, *residual = inputs
    y, *statistics = outputs
    struct = BatchNormStruct(
        *map(view_struct, (_rows(x), _rows(y), weight, bias, running_mean, running_var)),
        view_struct(_rows(residual[0]) if residual else None),
        *map(view_struct, statistics),
        kind.eps,
        kind.momentum,
        kind.epilogue.activation == "relu",
    )
    measure = Kernel(load(), "batch_norm_statistics", struct)
    finish = Kernel(load(), "batch_norm_finish", Of(measure.address), measure)
    return [measure, finish, Kernel(load(), "batch_norm_apply", struct)]


def batch_norm_gradient(inputs: Sequence[View], outputs: Sequence[View]) -> list[Kernel]:
    """Bind a :class:`~mlsys_nimble.ir.operators.BatchNormGradient` to its inputs and outputs."""
    dy, x, weight, mean, rstd = inputs
    dx, dweight, dbias = outputs
    images = (_rows(view) for view in (dy, x, dx))
    struct = BatchNormGradientStruct(*map(view_struct, (*images, weight, mean, rstd, dweight, dbias)))
    sums = Kernel(load(), "batch_norm_gradient_sums", struct)
    finish = Kernel(load(), "batch_norm_gradient_finish", Of(sums.address), sums)
    return [sums, finish, Kernel(load(), "batch_norm_gradient_apply", Of(sums.address), sums)]
