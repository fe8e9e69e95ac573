"""Random programs of tensor operators, drawn by hypothesis: views, joins, reductions, broadcasts, writes in place.

A program is plain data, so that a failing one prints as code to copy. Steps name the values they read by number, inputs
first; a step that torch refuses (shapes that do not fit) is left out while the program is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st

from tests.oracles.nimble_programs.steps import STEPS, Shape

MOST_STEPS, FEWEST_STEPS, MOST_ELEMENTS = 12, 3, 4096


@dataclass(frozen=True)
class Program:
    """Inputs by dtype and shape, steps, and which values are returned."""

    inputs: tuple[tuple[str, Shape], ...]
    steps: tuple[tuple[str, tuple[int, ...], tuple[Any, ...]], ...]  # name, values read, parameters
    outputs: tuple[int, ...]
    owns_inputs: bool  # False: works on copies, so that its inputs may want gradients

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Run it."""
        values = list(tensors) if self.owns_inputs else [tensor.clone() for tensor in tensors]
        for name, places, parameters in self.steps:
            values.append(STEPS[name].run(*[values[place] for place in places], *parameters))
        return [values[place] for place in self.outputs]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The inputs: the same numbers at every call."""
        generator = torch.Generator().manual_seed(len(self.steps))
        return tuple(_numbers(dtype, shape, generator) for dtype, shape in self.inputs)

    def __str__(self) -> str:
        lines = [f"v{i} = {dtype}{list(shape)}" for i, (dtype, shape) in enumerate(self.inputs)]
        for number, (name, places, parameters) in enumerate(self.steps, len(self.inputs)):
            arguments = [*(f"v{place}" for place in places), *map(repr, parameters)]
            lines.append(f"v{number} = {name}({', '.join(arguments)})")
        return "\n".join([*lines, f"return {', '.join(f'v{place}' for place in self.outputs)}"])


def _numbers(dtype: str, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    if dtype.startswith("int"):
        return torch.randint(-9, 9, shape, generator=generator).to(getattr(torch, dtype))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))


SIZES = st.sampled_from([1, 2, 3, 4, 4, 6, 8])
SHAPES = st.one_of(
    st.lists(SIZES, min_size=0, max_size=4).map(tuple),
    st.tuples(st.sampled_from([1, 2]), st.sampled_from([3, 4, 8]), st.just(6), st.just(6)),  # images
    st.tuples(st.sampled_from([2, 3]), st.sampled_from([8, 16])),
    st.just((0, 3)),
)
DTYPES = st.sampled_from(["float32"] * 6 + ["float64", "int64", "int32"])


@st.composite
def programs(draw: Callable[[Any], Any], *, owns_inputs: bool = True) -> Program:
    """Programs that torch runs."""
    inputs = tuple(draw(st.lists(st.tuples(DTYPES, SHAPES), min_size=1, max_size=3)))
    names = sorted(STEPS)
    steps: list[tuple[str, tuple[int, ...], tuple[Any, ...]]] = []
    values = [torch.zeros(shape, dtype=getattr(torch, dtype)) for dtype, shape in inputs]
    for _ in range(draw(st.integers(FEWEST_STEPS, MOST_STEPS))):
        step = STEPS[name := draw(st.sampled_from(names))]
        places = tuple(draw(st.integers(0, len(values) - 1)) for _ in range(step.num_values))
        read = [values[place] for place in places]
        try:
            parameters = draw(step.parameters(*(tuple(value.shape) for value in read)))
            made = step.run(*read, *parameters)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            continue  # torch refuses
        if prod(made.shape) > MOST_ELEMENTS:
            continue
        values.append(made)
        steps.append((name, places, parameters))
    others = draw(st.lists(st.integers(0, len(values) - 1), max_size=2))
    return Program(inputs, tuple(steps), (len(values) - 1, *others), owns_inputs)
