"""torch's own modules as models: every class of torch's module tests, with the arguments tried there."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_modules import module_db

# The import of torch's tests forbids to set flags of torch.backends, for the whole process.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True


@dataclass(frozen=True)
class Case:
    """A module and inputs of a batch; the first dimension of each input is taken for that of requests."""

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]  # of any number of requests

    def alone(self, request: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return what the module itself gives one request, [1, ...] each; a module that changes state is copied."""
        with torch.no_grad():
            outputs = copy.deepcopy(self.module)(*request)
        return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)

    def requests(self, number: int, seed: int = 1) -> list[tuple[Tensor, ...]]:
        """Return requests, [1, ...] each: rows of the inputs, scaled by 0.1 to 100 where they are floats."""
        generator = torch.Generator().manual_seed(seed)
        made = []
        for position in range(number):
            factor = (1.0, 0.1, 3.0, 100.0)[position % 4]
            row = position % len(self.inputs[0])
            made.append(tuple(_varied(value[row : row + 1], factor, generator) for value in self.inputs))
        return made


class _With(nn.Module):
    """A module with its options."""

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        super().__init__()
        self.module, self.options = module, options

    def forward(self, *inputs: Tensor) -> Any:
        return self.module(*inputs, **self.options)


def cases(
    per_class: int, modes: tuple[bool, ...] = (False, True), names: tuple[str, ...] | None = None
) -> Iterator[Case]:
    """Yield cases class by class, ``per_class`` of each class and mode (evaluation, training) at most."""
    for info in module_db:
        if names is not None and info.name.removeprefix("nn.") not in names:
            continue
        for training in modes:
            torch.manual_seed(0)
            try:
                made = info.module_inputs_func(
                    info, device="cpu", dtype=torch.float32, requires_grad=False, training=training
                )
                suited = itertools.islice((each for each in made if _suits(each)), per_class)
                for number, sample in enumerate(suited):
                    given = sample.constructor_input
                    module = info.module_cls(*given.args, **given.kwargs)
                    module.train(training)
                    inputs = tuple(value.detach() for value in sample.forward_input.args)
                    if any(isinstance(each, nn.UninitializedParameter) for each in module.parameters()):
                        with torch.no_grad():
                            module(
                                *inputs, **sample.forward_input.kwargs
                            )  # lazy ones take their sizes from the first input
                    mode = "training" if training else "evaluation"
                    if sample.forward_input.kwargs:
                        module = _With(module, sample.forward_input.kwargs)
                    yield Case(f"{info.name.removeprefix('nn.')}[{number}] in {mode}", module, inputs)
            except (NotImplementedError, RuntimeError, TypeError, ValueError):
                continue  # torch itself cannot make the module so


def _suits(sample: Any) -> bool:
    """Return whether tensors come by position alone, each with a first dimension of one size."""
    given = sample.forward_input
    if given is None or not given.args or any(isinstance(value, Tensor) for value in given.kwargs.values()):
        return False
    if not all(isinstance(value, Tensor) and value.ndim and len(value) for value in given.args):
        return False
    return len({len(value) for value in given.args}) == 1


def _varied(value: Tensor, factor: float, generator: torch.Generator) -> Tensor:
    if not value.is_floating_point():
        return value.clone()
    return value * factor * (0.5 + torch.rand(value.shape, generator=generator))
