"""Elements taken by constant indices: which reads become a native gather, and that they give what torch gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mlsys_nimble import Nimble
from mlsys_nimble.backends.reference.operators import ReferenceExecutor
from mlsys_nimble.capture import capture
from mlsys_nimble.ir.operators import Aten, Input
from mlsys_nimble.ir.program import Operator, Program, ValueType, check_program
from mlsys_nimble.passes import optimise
from mlsys_nimble.passes.detection import find_points
from torch import nn
from torch.nn.functional import interpolate

from tests.nimble.passes.conftest import kinds_of

ROWS, COLUMNS = torch.tensor([[0], [4], [1]]), torch.tensor([5, 0, 2, -1])


def read(shape: tuple[int, ...], indices: tuple[torch.Tensor | None, ...]) -> Program:
    """Return a program of one read of x by constant indices."""
    given = [index for index in indices if index is not None]
    numbers = iter(range(1, 1 + len(given)))
    arguments = tuple(None if index is None else Input(next(numbers)) for index in indices)
    wanted = torch.empty(shape)[tuple(slice(None) if index is None else index for index in indices)]
    types = [ValueType(shape, "float32"), *(ValueType(tuple(index.shape), "int64") for index in given)]
    values = (*types, ValueType(tuple(wanted.shape), "float32"))
    kind = Aten("aten.index.Tensor", (Input(0), arguments))
    operator = Operator("read", kind, tuple(range(len(types))), (len(types),))
    return Program(values, (operator,), (0,), operator.outputs, dict(enumerate(given, 1)))


@pytest.mark.parametrize(
    ("shape", "indices"),
    [
        ((1, 3, 5, 6), (None, None, ROWS, COLUMNS)),
        ((2, 3, 5, 6), (None, None, ROWS, COLUMNS)),
        ((2, 5, 6, 3), (None, ROWS, COLUMNS)),  # dimensions behind the indexed ones stay behind
        ((5, 6, 7), (ROWS, COLUMNS, torch.tensor(-7))),  # all, with a number beside arrays
    ],
)
def test_neighbouring_dimensions_are_one_gather_of_the_same_elements(shape: Any, indices: Any) -> None:
    program = read(shape, indices)
    found = find_points(program)
    check_program(found)
    assert "Aten" not in kinds_of(found)
    assert kinds_of(found).count("Gather") == 1
    x = torch.randn(shape)
    assert torch.equal(ReferenceExecutor(found).run([x])[0], ReferenceExecutor(program).run([x])[0])


@pytest.mark.parametrize(
    "indices",
    [
        (None, ROWS, None, COLUMNS),  # torch puts these dimensions first
        (None, None, ROWS + 1, COLUMNS),  # torch raises
        (None, None, ROWS, COLUMNS - 6),
        (None, None, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)),
    ],
)
def test_other_reads_stay_torchs(indices: Any) -> None:
    shape = (1, 5, 5, 6)
    kind = read(shape, (None, None, ROWS, COLUMNS)).operators[0].kind
    assert isinstance(kind, Aten)
    numbers = iter((1, 2))
    arguments = tuple(None if index is None else Input(next(numbers)) for index in indices)
    given = [index for index in indices if index is not None]
    values = tuple(ValueType(s, "float32") for s in (shape, (1,), (1,), (1,)))
    operator = Operator("read", Aten(kind.target, (Input(0), arguments)), (0, 1, 2), (3,))
    program = Program(values, (operator,), (0,), (3,), dict(enumerate(given, 1)))
    assert kinds_of(find_points(program)) == ["Aten"]


class Resized(nn.Module):
    """A resize between convolutions."""

    def __init__(self, mode: str, factor: float) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.mode, self.factor = mode, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map an image to one of another size."""
        return self.after(interpolate(self.before(x), scale_factor=self.factor, mode=self.mode))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("mode", "factor", "batch"), [("bilinear", 2.0, 1), ("bilinear", 0.5, 2), ("bicubic", 1.5, 1)])
def test_a_resize_runs_without_torch_and_equals_eager(mode: str, factor: float, batch: int) -> None:
    torch.manual_seed(0)
    model, x = Resized(mode, factor).eval(), torch.randn(batch, 3, 8, 10)
    assert "Aten" not in kinds_of(optimise(capture(model, (x,)).program)[0])
    prepared = Nimble(model)
    prepared.prepare(x)
    with torch.inference_mode():
        torch.testing.assert_close(prepared(x), model(x), rtol=1e-5, atol=1e-5)
        x[0, 0, 3, 3] = torch.inf  # only its neighbours become infinite or NaN
        assert torch.equal(prepared(x).isfinite(), model(x).isfinite())
