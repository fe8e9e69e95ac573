"""A case of conformance: a small model and a maker of fresh inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Inputs = Callable[[torch.Generator], tuple[Any, ...]]


class Case(NamedTuple):
    name: str
    model: Callable[[], Any]
    inputs: Inputs


def normal(*shapes: tuple[int, ...]) -> Inputs:
    return lambda generator: tuple(torch.randn(shape, generator=generator) for shape in shapes)


def integers(high: int, *shapes: tuple[int, ...]) -> Inputs:
    return lambda generator: tuple(torch.randint(0, high, shape, generator=generator) for shape in shapes)


class Call(nn.Module):
    """A function of tensors and of layers, as a module."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            if isinstance(layer, nn.Module):
                self.add_module(name, layer)
            else:
                self.register_buffer(name, layer)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args) if self._modules or self._buffers else self.function(*args)


def with_statistics(model: nn.Module) -> nn.Module:
    """Batch norms that have seen data."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model
