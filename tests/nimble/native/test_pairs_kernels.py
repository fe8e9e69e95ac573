"""Products of bf16 pairs against float64 and against torch's own bf16, within what sums in float32 may round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mlsys_nimble.backends.cpu import convolutions, library
from mlsys_nimble.backends.cpu.library import View
from mlsys_nimble.backends.cpu.replay import ReplayPlan, Team
from mlsys_nimble.backends.operators.convolution import pairs_kernel
from mlsys_nimble.backends.reference.pointwise import with_epilogue
from mlsys_nimble.ir.operators import NOTHING, Convolution, Epilogue, Linear
from mlsys_nimble.planning.planner import Assignment, Piece
from torch import Tensor
from torch.nn import functional

from tests.nimble.native.conftest import in_pieces

UNIT = 2.0**-24  # of float32: the most that one addition rounds, over its result


CASES = {  # channels, columns, groups, kernel, stride, padding, dilation, space
    "linear": (64, 40, 1, (1,), (1,), (0,), (1,), (23,)),
    "one row": (200, 70, 1, (1,), (1,), (0,), (1,), (1,)),
    "odd linear": (37, 7, 1, (1,), (1,), (0,), (1,), (5,)),
    "long sums": (2304, 33, 1, (1,), (1,), (0,), (1,), (210,)),
    "image": (3, 32, 1, (7, 7), (2, 2), (3, 3), (1, 1), (19, 23)),
    "window": (20, 48, 1, (3, 3), (1, 1), (1, 1), (1, 1), (9, 11)),
    "odd window": (17, 20, 1, (3, 3), (1, 1), (1, 1), (1, 1), (6, 5)),
    "strided pixels": (32, 33, 1, (1, 1), (2, 2), (0, 0), (1, 1), (7, 9)),
    "grouped": (24, 40, 4, (3, 3), (2, 1), (1, 2), (1, 1), (8, 7)),
    "dilated": (5, 17, 1, (3, 2), (1, 1), (2, 0), (2, 3), (9, 12)),
    "voxels": (6, 8, 2, (2, 3, 2), (1, 2, 1), (1, 0, 1), (1, 1, 1), (4, 5, 6)),
}


def last(tensor: Tensor, extra: int = 0) -> Tensor:
    """The tensor [N, C, *space] with channels side by side, pixels ``C + extra`` apart."""
    moved = functional.pad(tensor.movedim(1, -1), (0, extra)).contiguous()
    return moved[..., : tensor.shape[1]].movedim(-1, 1)


def drawn(case: str, epilogue: Epilogue = NOTHING) -> tuple[Convolution, Tensor, Tensor, Tensor]:
    """A convolution, its input, its weight of values that bf16 holds, and its bias."""
    torch.manual_seed(len(case))
    channels, columns, groups, kernel, stride, padding, dilation, space = CASES[case]
    weight = torch.randn(columns, channels // groups, *kernel).bfloat16().float()
    kind = Convolution(stride, tuple((each, each) for each in padding), dilation, groups, True, epilogue)
    return kind, torch.randn(2, channels, *space), weight, torch.randn(columns)


def convolved(kind: Convolution, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    convolve: Any = (functional.conv1d, functional.conv2d, functional.conv3d)[len(kind.stride) - 1]
    padding = [before for before, _ in kind.padding]
    y: Tensor = convolve(x, weight, bias, kind.stride, padding, kind.dilation, kind.groups)
    return y


@pytest.mark.parametrize("order", ["pixels", "planes"])
@pytest.mark.parametrize("case", CASES)
def test_sums_are_those_of_rounded_operands(case: str, order: str, native: Any) -> None:
    kind, x, weight, bias = drawn(case)
    x = last(x, extra=4) if order == "pixels" else x
    exact = convolved(kind, x.bfloat16().double(), weight.double(), bias.double())
    sizes = convolved(kind, x.bfloat16().double().abs(), weight.double().abs(), bias.double().abs())
    out = last(torch.zeros_like(exact, dtype=torch.float32), extra=3)
    got = in_pieces(pairs_kernel(kind, View.of(x), weight, bias, View.of(out)), out)
    num_terms = weight[0].numel() + 4  # bias, a padded pair, and up to four partial sums
    bound = num_terms * UNIT / (1 - num_terms * UNIT) * sizes
    assert bool(((got.double() - exact).abs() <= bound).all())
    torchs = convolved(kind, x.bfloat16(), weight.bfloat16(), torch.zeros_like(bias).bfloat16()).double()
    without = got.double() - bias.double().reshape(-1, *(1,) * (x.dim() - 2))
    assert bool(((without - torchs).abs() <= 2.0**-8 * torchs.abs() + 2 * bound).all())  # theirs is rounded again


EPILOGUES = {
    "relu": Epilogue("relu"),
    "relu6, residual": Epilogue("relu6", has_residual=True),
    "gelu": Epilogue("gelu"),
    "residual after silu": Epilogue("silu", has_residual=True, activates_first=True),
}


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("case", ["odd linear", "window"])
def test_epilogues_are_in_floats(case: str, epilogue: str, native: Any) -> None:
    how = EPILOGUES[epilogue]
    kind, x, weight, bias = drawn(case, how)
    plain = convolved(kind, x.bfloat16().double(), weight.double(), bias.double())
    residual = last(torch.randn(plain.shape)) if how.has_residual else None
    given = [] if residual is None else [residual.double()]
    expected = with_epilogue(how, lambda: plain)(*given)
    x, out, view = last(x), last(torch.zeros(plain.shape), extra=1), None if residual is None else View.of(residual)
    kernel = pairs_kernel(kind, View.of(x), weight, bias, View.of(out), residual=view)
    torch.testing.assert_close(in_pieces(kernel, out).double(), expected, rtol=3e-6, atol=2e-5)


def test_pixels_round_as_torch_does(native: Any) -> None:
    ties = torch.tensor([1.00390625, 1.01171875, -1.00390625, 3.4e38, float("inf"), float("-inf"), float("nan"), 0.1])
    odd_nan = torch.tensor([0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)
    x = torch.cat([ties, odd_nan, torch.randn(27) * 1e3])[:, None]
    out = torch.zeros_like(x)
    kind = Convolution((1,), ((0, 0),), (1,), 1, False)
    shape = (1, 1, x.numel())
    views = (View.of(x.reshape(shape)), View.of(out.reshape(shape)))
    pairs_kernel(kind, views[0], torch.ones(1, 1, 1), None, views[1]).run()
    assert torch.equal(out.isnan(), x.isnan())
    assert torch.equal(out.nan_to_num(7.0), x.bfloat16().float().nan_to_num(7.0))


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("workers", [1, 2])
def test_rows_that_a_thread_gathered_are_those_of_the_replay(workers: int, jobs: int) -> None:
    weight, bias = torch.randn(600, 64).bfloat16().float(), torch.randn(600)
    x, outs = torch.empty(1, 30, 64), [torch.empty(1, 30, 600) for _ in range(jobs)]
    kind = Convolution((1,), ((0, 0),), (1,), 1, True)
    line = (0, 2, 1)  # a linear is a convolution over a line of pixels
    kernels = {
        job: pairs_kernel(kind, View.of(x).permuted(line), weight[..., None], bias, View.of(out).permuted(line))
        for job, out in enumerate(outs)
    }
    parts = [[Piece(job, part, workers) for job in kernels] for part in range(workers)]
    units = kernels[0].units
    assert units > 2 * workers  # claimed in several pieces, one unit at least
    seconds = dict.fromkeys(kernels, units * 20e-6)
    plan = ReplayPlan(Assignment(tuple(map(tuple, parts)), 0.0), kernels, workers, seconds)
    team = Team(workers)
    for _ in range(3):
        x.normal_()
        team.run(plan)
        exact = functional.linear(x.bfloat16().double(), weight.double(), bias.double())
        for out in outs:
            torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("columns", [1, 17, 64, 100])
@pytest.mark.parametrize("rows", [1, 2, 13])
def test_linears(rows: int, columns: int, native: Any):
    torch.manual_seed(0)
    x, bias, residual = torch.randn(rows, 131), torch.randn(columns), torch.randn(rows, columns)
    weight = torch.randn(columns, 131).bfloat16().float()
    kind = Linear(has_bias=True, epilogue=Epilogue("silu", has_residual=True))
    results = []
    for one in (library.load(), library.load_bf16()):
        out = torch.zeros(rows, columns)
        views = View.of(x), weight, bias, View.of(out)
        results.append(in_pieces(convolutions.linear(kind, *views, residual=View.of(residual), library=one), out))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("channels", [6, 24])
def test_convolutions(channels: int, groups: int, native: Any):
    torch.manual_seed(1)
    x = torch.randn(2, channels, 9, 7).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(20, channels // groups, 3, 3).bfloat16().float(), torch.randn(20)
    kind = Convolution((1, 1), ((1, 1), (1, 1)), (1, 1), groups, True, Epilogue("relu"))
    results = []
    for one in (library.load(), library.load_bf16()):
        out = torch.zeros(2, 20, 9, 7).contiguous(memory_format=torch.channels_last)
        results.append(
            in_pieces(convolutions.convolution(kind, View.of(x), weight, bias, View.of(out), library=one), out)
        )
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
