"""Batch norm of training: torch runs it on every backend but where training fuses it."""

from __future__ import annotations

from typing import Any

import torch
from mlsys_nimble.backends.reference.epilogue import with_epilogue
from mlsys_nimble.backends.table import Family, Run
from mlsys_nimble.ir import operators as kinds
from mlsys_nimble.ir.program import ValueType
from torch import Tensor

FAMILY = Family()


@FAMILY.meaning(kinds.BatchNormTraining)
def _batch_norm_training(kind: kinds.BatchNormTraining, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    finish = with_epilogue(kind.epilogue, lambda y: y)

    def run(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, *residual: Tensor) -> Any:
        normalise = torch.ops.aten._native_batch_norm_legit_functional.default
        y, *statistics = normalise(x, weight, bias, mean, var, True, kind.momentum, kind.eps)
        return (finish(y, *residual), *statistics)

    return run


@FAMILY.meaning(kinds.BatchNormGradient)
def _batch_norm_gradient(kind: kinds.BatchNormGradient, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    def run(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> Any:
        gradient = torch.ops.aten.native_batch_norm_backward.default
        return gradient(dy, x, weight, None, None, mean, rstd, True, 0.0, [True] * 3)

    return run
