"""Cutting models: where it is allowed, that stages give what the whole gives, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import ServeRequest
from mlsys_dvabatch.stages.activations import Packed, Padded
from mlsys_dvabatch.stages.slicing.partition import diversity_cuts, even_cuts
from mlsys_dvabatch.stages.slicing.program import load_program, program_of
from mlsys_dvabatch.stages.slicing.sliced import SlicedModel, slice_evenly
from mlsys_dvabatch.stages.vision import VGG19, LinkNet, ResNet152, UNet
from torch import Tensor, nn

ZEROS = np.zeros(4, np.float32)


class Skips(nn.Module):
    """A side input that the last operator needs, a batch size in the middle, and a constant that is no row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.register_buffer("shift", torch.arange(4.0))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.first(x))
        hidden = hidden.view(hidden.shape[0], 2, 3).flatten(1)
        out = self.second(hidden) + y * self.shift
        return out, out.sum(1, keepdim=True)


def run_all(model: SlicedModel, values: Padded) -> list[Tensor]:
    with torch.inference_mode():
        for stage in range(model.num_stages):
            values = model.run(stage, values)
    return list(values.tensors.values())


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_stages_give_what_the_whole_gives(num_stages: int):
    torch.manual_seed(0)
    module = Skips().eval()
    program = program_of(module, (torch.randn(1, 4), torch.randn(1, 4)))
    model = slice_evenly(program, num_stages)
    assert model.num_stages == num_stages
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    requests = [ServeRequest(str(row), (x[row].numpy(), y[row].numpy())) for row in range(7)]
    out, total = run_all(model, model.collate(requests, 1))
    expected, expected_total = module(x, y)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(total, expected_total)


def test_every_allowed_cut_works():
    module = Skips().eval()
    program = program_of(module, (torch.randn(1, 4), torch.randn(1, 4)))
    assert len(program.allowed_cuts) >= 4
    for cut in program.allowed_cuts:
        SlicedModel(program, [cut])  # checks equality itself


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (UNet(4), (3, 32, 32)),
        (LinkNet(8), (3, 64, 64)),
        (VGG19(32, width=4, num_classes=5, hidden=16), (3, 32, 32)),
        (ResNet152(width=4, num_classes=5, depths=(1, 2, 2, 1)), (3, 32, 32)),
    ],
    ids=["unet", "linknet", "vgg19", "resnet152"],
)
def test_the_papers_models(module: nn.Module, shape: tuple[int, ...]):
    torch.manual_seed(1)
    module.eval()
    model = slice_evenly(program_of(module, (torch.randn(1, *shape),)), 4)
    image = torch.randn(3, *shape)
    (got,) = run_all(model, model.collate([ServeRequest(str(n), (image[n].numpy(),)) for n in range(3)], 1))
    with torch.inference_mode():
        torch.testing.assert_close(got, module(image), rtol=1e-4, atol=1e-4)


def test_side_inputs_are_carried_in_a_unet():
    program = program_of(UNet(4).eval(), (torch.randn(1, 3, 32, 32),))
    middle = program.allowed_cuts[len(program.allowed_cuts) // 2]
    assert len(program.crossing(middle)) == 5  # what goes on, and a skip connection of each level


def test_a_pt2_file(tmp_path: Path):
    module = Skips().eval()
    batch = torch.export.Dim("batch", min=1)
    inputs = (torch.randn(2, 4), torch.randn(2, 4))
    torch.export.save(
        torch.export.export(module, inputs, dynamic_shapes=({0: batch}, {0: batch})), tmp_path / "model.pt2"
    )
    program = load_program(tmp_path / "model.pt2")
    assert slice_evenly(program, 3).num_stages == 3


def test_a_model_without_batches_is_refused(tmp_path: Path):
    fixed = torch.export.export(Skips().eval(), (torch.randn(2, 4), torch.randn(2, 4)))
    torch.export.save(fixed, tmp_path / "fixed.pt2")
    with pytest.raises(InvalidInputError, match="dynamic first dimension"):
        load_program(tmp_path / "fixed.pt2")


class Words(nn.Module):
    """Takes the mean of any number of words."""

    def __init__(self, num_inputs: int = 1) -> None:
        super().__init__()
        self.num_inputs = num_inputs
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, words: Tensor, shift: Tensor | None = None) -> Tensor:
        out = self.head(self.embedding(words).mean(1))
        return out if shift is None else out + shift.float().mean(1, keepdim=True)


def words_file(path: Path, num_inputs: int = 1) -> Path:
    dims = {0: torch.export.Dim("batch", min=1), 1: torch.export.Dim("length", min=2, max=64)}
    inputs = tuple(torch.zeros(2, 7, dtype=torch.long) for _ in range(num_inputs))
    program = torch.export.export(Words(num_inputs).eval(), inputs, dynamic_shapes=(dims, dims)[:num_inputs])
    torch.export.save(program, path)
    return path


def test_a_dynamic_length_is_frozen_where_a_shape_is_asked_for(tmp_path: Path):
    """Its requests may have several shapes (test_sized.py); --shape serves one, and it must be one of them."""
    file = words_file(tmp_path / "words.pt2")
    assert load_program(file).sizes is not None
    model = slice_evenly(load_program(file, (torch.randn(1, 12),)), 1)
    (example,) = model.example
    assert example.shape == (12,)
    assert example.dtype == np.int64
    with pytest.raises(InvalidInputError, match=r"takes int64 \[12\], got int64 \[7\]"):
        model.check((np.zeros(7, np.int64),))
    for shape in ((1, 65), (1, 1), (1, 3, 3)):
        with pytest.raises(InvalidInputError, match=r"takes requests of shape \(2 to 64\), got"):
            load_program(file, (torch.randn(*shape),))
    both = words_file(tmp_path / "both.pt2", 2)
    with pytest.raises(InvalidInputError, match="takes 2 inputs, and --shape is the shape of one"):
        load_program(both, (torch.randn(1, 7),))


class Mixes(nn.Module):
    """Its requests depend on each other from the first operator on."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)).t().matmul(torch.ones(1)).unsqueeze(0)


def test_models_that_cannot_be_sliced_are_refused():
    program = program_of(nn.Linear(3, 3).eval(), (torch.randn(1, 3),))
    with pytest.raises(InvalidInputError, match="can be cut at"):
        slice_evenly(program, 20)
    with pytest.raises(InvalidInputError, match="cannot be exported"):
        program_of(Mixes(), (torch.randn(1, 3),))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.pt2", b"no program", "no zip archive"),
        ("a.txt", b"", "a .pt2 or .onnx file"),
        ("a.pt2", None, "there is no file"),
    ],
    ids=["damaged", "suffix", "missing"],
)
def test_bad_files_are_refused(
    tmp_path: Path, name: str, content: bytes | None, says: str, capfd: pytest.CaptureFixture[str]
):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInputError, match=says):
        load_program(tmp_path / name)
    assert "Traceback" not in capfd.readouterr().err


def test_a_compiler_that_changes_answers_is_refused():
    program = program_of(Skips().eval(), (torch.randn(1, 4), torch.randn(1, 4)))
    with pytest.raises(InvalidInputError, match="do not give what the whole model gives"):
        SlicedModel(
            program,
            program.allowed_cuts[:1],
            compile_stage=lambda module, example: lambda *args: [value + 0.1 for value in module(*args)],
        )


def test_stages_may_be_compiled():
    compiled: list[int] = []

    def compile_stage(module: torch.fx.GraphModule, example: tuple[Tensor, ...]) -> torch.fx.GraphModule:
        compiled.append(len(example))
        return module

    program = program_of(Skips().eval(), (torch.randn(1, 4), torch.randn(1, 4)))
    SlicedModel(program, program.allowed_cuts[:2], compile_stage=compile_stage)
    assert len(compiled) == 3


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (ZEROS, "a tuple of 2"),
        ((ZEROS,), "a tuple of 2"),
        ((ZEROS, np.zeros(5, np.float32)), "'y' takes float32 \\[4\\], got float32 \\[5\\]"),
        ((ZEROS, ZEROS.astype(np.int64)), "got int64"),
        ((ZEROS, np.full_like(ZEROS, np.nan)), "only finite"),
        ((ZEROS, torch.zeros(4)), "got Tensor"),
        ((ZEROS, "no"), "got str"),
    ],
    ids=["bare", "one", "shape", "dtype", "nan", "tensor", "text"],
)
def test_bad_requests_are_refused(payload: object, says: str):
    program = program_of(Skips().eval(), (torch.randn(1, 4), torch.randn(1, 4)))
    with pytest.raises(InvalidInputError, match=says):
        SlicedModel(program, []).check(payload)


def brute_force(seconds: list[int], allowed: list[int], num_stages: int) -> float:
    best = float("inf")
    for cuts in itertools.combinations(allowed, num_stages - 1):
        bounds = [0, *cuts, len(seconds)]
        best = min(best, max(sum(seconds[a:b]) for a, b in itertools.pairwise(bounds)))
    return best


@given(st.data())
def test_even_cuts_are_the_best(data: st.DataObject):
    seconds = data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=9))
    allowed = sorted(data.draw(st.sets(st.integers(1, len(seconds) - 1), min_size=1)))
    num_stages = data.draw(st.integers(1, len(allowed) + 1))
    cuts = even_cuts(seconds, allowed, num_stages)
    assert len(cuts) == num_stages - 1
    assert set(cuts) <= set(allowed)
    bounds = [0, *cuts, len(seconds)]
    longest = max(sum(seconds[a:b]) for a, b in itertools.pairwise(bounds))
    assert longest == brute_force(seconds, allowed, num_stages)


def test_diversity_cuts_are_where_preferences_change():
    assert diversity_cuts([32, 32, 4, 4, 8, 1], [1, 2, 3, 4, 5], 3) == [2, 5]
    assert diversity_cuts([4, 4, 4], [1, 2], 3) == []


def test_activations_select_and_join():
    padded = Padded({"a": torch.arange(6.0).view(3, 2), "n": torch.arange(3)})
    both = padded.select([2, 0]).join([padded.select([1])])
    assert both.tensors["n"].tolist() == [2, 0, 1]
    assert both.tensors["a"][:, 0].tolist() == [4.0, 0.0, 2.0]
    packed = Packed(torch.arange(6.0)[:, None], (1, 3, 2))
    joined = packed.select([2, 0]).join([packed.select([1])])
    assert joined.lengths == (2, 1, 3)
    assert joined.tokens[:, 0].tolist() == [4, 5, 0, 1, 2, 3]


class Missing(nn.Module):
    """Takes the mean where one of its first two numbers is missing; the third must be there."""

    def forward(self, x: Tensor) -> Tensor:
        known = torch.where(x.isnan(), torch.tensor(0.5), x)
        return known.cumsum(1) * x[:, 2:]


@pytest.mark.parametrize("num_cuts", [0, 1])
def test_a_model_that_takes_nan_for_missing_may_be_asked_so(num_cuts: int):
    program = program_of(Missing().eval(), (torch.randn(1, 3),))
    model = SlicedModel(program, program.allowed_cuts[:num_cuts])
    assert model.may_be_missing[0].tolist() == [True, True, False]
    assert model.check((np.array([0.0, np.nan, 1.0], np.float32),)) == 1
    for row in ([0.0, np.inf, 1.0], [0.0, 0.0, np.nan]):
        with pytest.raises(InvalidInputError, match="only finite"):
            model.check((np.array(row, np.float32),))
    linear = program_of(nn.Linear(3, 2).eval(), (torch.randn(1, 3),))
    assert not SlicedModel(linear, []).may_be_missing[0].any()


class Returns(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def test_results_of_any_structure_are_served_in_the_order_of_their_leaves() -> None:
    nested = Returns(lambda x: {"b": x * 2, "a": [x.sum(1), {"none": None, "x": x > 0}]})
    program = program_of(nested, (torch.randn(1, 3),))
    model = SlicedModel(program, ())
    row = np.array([1.0, -2.0, 3.0], np.float32)
    answers = model.answers([(row,), (row + 1,)])
    assert [[each.tolist() for each in answer] for answer in answers] == [
        [[2, -4, 6], 2, [True, False, True]],
        [[4, -2, 8], 5, [True, False, True]],
    ]


@pytest.mark.parametrize(
    ("function", "said"),
    [(lambda x: (x * 2, x.shape[0]), "returns int beside tensors"), (lambda x: x, "has no operators")],
)
def test_results_that_no_request_can_have_are_refused(function: Any, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        SlicedModel(program_of(Returns(function), (torch.randn(1, 3),)), ())
