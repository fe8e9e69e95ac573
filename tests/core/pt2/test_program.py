"""A safe load gives the program that was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_core.pt2.program import load_program
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._pytree import tree_leaves


def same(left: Any, right: Any) -> bool:
    """Compare two results bit for bit."""
    pairs = zip(tree_leaves(left), tree_leaves(right), strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def test_the_same_program_comes_back(original: Path, net: nn.Module, inputs: Any):
    saved = load_program(original)
    module = saved.program.module()
    assert same(module(*inputs), net(*inputs))
    assert same(module({"x": inputs[0]["x"][:4]}, inputs[1][:4]), net({"x": inputs[0]["x"][:4]}, inputs[1][:4]))
    assert saved.extra == {"note.json": "{}"}
    assert {name for name, _ in saved.program.named_parameters()} == {"linear.weight", "linear.bias"}


def test_torchs_checks_of_inputs_still_hold(original: Path, inputs: Any):
    module = load_program(original).program.module()
    with pytest.raises(AssertionError, match="Guard failed"):  # rows // 2 rows of 8 numbers: an even number of rows
        module({"x": inputs[0]["x"][:5]}, inputs[1][:5])


def test_examples_fit_the_program_and_are_always_the_same(original: Path):
    first, second = load_program(original), load_program(original)
    assert first.example_args is not None
    assert first.example_args[0]["x"].shape == (6, 4)
    assert first.example_args[1].dtype == torch.int64
    assert same(first.example_args, second.example_args)
    assert first.example_kwargs == {}
    first.program.module()(*first.example_args)


def test_trusted_files_bring_their_own_examples(original: Path, inputs: Any):
    assert same(load_program(original, trust_code=True).example_args, inputs)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            double = x * 2
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)), double


class Sizes(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        rows = x.shape[0]
        longer = torch.cat([x, y])[: (rows + 3) // 2]
        counted = x.nonzero()
        return longer * rows, counted, torch.ones(torch.sym_max(rows, 3), max(1, rows - 1)), torch.zeros(rows % 7 + 1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, 2, batch_first=True)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return self.lstm(x)[0] * scale


class Odd(nn.Module):
    """Weights that share memory, are views, empty, 0-d, complex and of small types."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.arange(24.0).view(4, 6)
        self.register_buffer("whole", whole)
        self.register_buffer("transposed", whole.T)
        self.register_buffer("part", whole[1:3, ::2])
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("scalar", torch.tensor(2.5))
        self.register_buffer("waves", torch.ones(3, dtype=torch.complex64) * 1j)
        self.register_buffer("small", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("flags", torch.tensor([True, False, True]))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        total = x + self.scalar + self.part.sum() + self.transposed.sum()
        return total, self.whole @ self.transposed, self.empty, self.waves * x, self.small[self.flags] * 2


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("module", "args", "kwargs", "dynamic"),
    [
        pytest.param(Branches(), (X,), {}, None, id="branches"),
        pytest.param(Sizes(), (X, X[:5]), {}, ({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}), id="sizes"),
        pytest.param(Recurrent(), (X[None],), {"scale": torch.ones(8)}, None, id="recurrent"),
        pytest.param(Odd(), (torch.ones(3),), {}, None, id="odd-weights"),
        pytest.param(
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.AvgPool2d(2), nn.Upsample(None, 1.5)),
            (torch.ones(2, 3, 9, 9),),
            {},
            ({0: Dim.DYNAMIC, 2: Dim.DYNAMIC},),
            id="pictures",
        ),
        pytest.param(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (X.view(1, 3, 8),), {}, None, id="transformer"
        ),
    ],
)  # fmt: skip
def test_programs_of_many_kinds(tmp_path: Path, module: nn.Module, args: Any, kwargs: Any, dynamic: Any):
    exported = torch.export.export(module.eval(), args, kwargs, dynamic_shapes=dynamic)
    torch.export.save(exported, tmp_path / "m.pt2")
    loaded = load_program(tmp_path / "m.pt2")
    assert same(loaded.program.module()(*args, **kwargs), module(*args, **kwargs))
    assert loaded.example_args is not None
    loaded.program.module()(*loaded.example_args, **loaded.example_kwargs)


def test_weights_share_memory_as_they_did(tmp_path: Path):
    torch.export.save(torch.export.export(Odd(), (torch.ones(3),)), tmp_path / "m.pt2")
    weights = load_program(tmp_path / "m.pt2").program.state_dict
    assert weights["transposed"].data_ptr() == weights["whole"].data_ptr()


def test_a_file_of_another_kind_is_told_in_one_line(tmp_path: Path, forge: Callable[..., Path]):
    (tmp_path / "text.pt2").write_text("none")
    with pytest.raises(InvalidInputError, match="no zip archive"):
        load_program(tmp_path / "text.pt2")
    with pytest.raises(InvalidInputError, match=r"there is no file .*torch\.export\.save"):
        load_program(tmp_path / "none.pt2")
    with pytest.raises(InvalidInputError, match="is not what torch"):
        load_program(tmp_path / "text.pt2", trust_code=True)
