"""Epilogues in torch: what a kind applies to its result before it is stored."""

from __future__ import annotations

from collections.abc import Callable

import torch
from mlsys_nimble.backends.table import Run
from mlsys_nimble.ir import operators as kinds
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "relu": torch.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
}


def with_epilogue(epilogue: kinds.Epilogue, main: Run) -> Run:
    """Return ``main`` followed by the epilogue."""
    if epilogue == kinds.NOTHING:
        return main
    activation = ACTIVATIONS[epilogue.activation] if epilogue.activation else None
    extra = (epilogue.slope,) if epilogue.activation in ("leaky_relu", "elu") else ()

    def run(*inputs: Tensor) -> Tensor:
        residual = None
        if epilogue.has_residual:
            *rest, residual = inputs
            inputs = tuple(rest)
        y: Tensor = main(*inputs)
        if residual is not None and not epilogue.activates_first:
            y = y + residual
        y = activation(y, *extra) if activation else y
        return y + residual if residual is not None and epilogue.activates_first else y

    return run
