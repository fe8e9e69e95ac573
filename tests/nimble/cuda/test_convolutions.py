"""Choice of a convolution's library and layout, by measurements that the recorder makes up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mlsys_nimble.backends.cuda import executor as pools
from mlsys_nimble.backends.cuda.convolutions import LAYOUTS, SelectedConvolution, fastest, layouts_of
from mlsys_nimble.backends.cuda.executor import CudaExecutor
from mlsys_nimble.capture import capture
from mlsys_nimble.ir.program import Program
from mlsys_nimble.passes import optimise
from torch import nn


@pytest.fixture(autouse=True)
def own_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_SHARED", {})


def net() -> nn.Module:
    same = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *same).eval()


def program_of(model: nn.Module, *shape: int) -> Program:
    return optimise(capture(model, (torch.randn(shape),)).program)[0]


def test_a_small_difference_decides_nothing():
    assert fastest({"a": 1.0, "b": 0.985, "c": 1.2}) == "a"
    assert fastest({"a": 1.0, "b": 0.9, "c": 0.8}) == "c"


def test_layouts_are_measured_where_there_are_images():
    assert layouts_of(program_of(net(), 1, 3, 8, 8)) == LAYOUTS
    assert layouts_of(program_of(nn.Linear(3, 3), 1, 3)) == LAYOUTS[:1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_faster_schedule_is_kept_and_each_convolution_its_faster_way(layout: str, driver: Any):
    model, x = net(), torch.randn(2, 3, 8, 8)
    # Row by row: the first convolution is faster without cuDNN, the two others, which are equal, are measured once.
    ways = [1.0, 0.5, 1.0, 1.0]
    schedules = [1.0, 0.5] if layout == "channels last" else [1.0, 2.0]
    driver.times = [*ways, *ways, *schedules]
    executor = CudaExecutor(program_of(model, *x.shape), driver=driver, kernels="aten")
    (made,) = executor.run([x])
    assert driver.times == []
    assert executor.layout == layout
    torch.testing.assert_close(made, model(x))
    assert made.is_contiguous(memory_format=torch.channels_last) == (layout == "channels last")
    (recorder,) = executor._recorders.values()
    found = [function.way for function in recorder._functions if isinstance(function, SelectedConvolution)]
    assert found == ["native", "cudnn", "cudnn"]
    for _ in range(2):
        y = torch.randn(2, 3, 8, 8)
        torch.testing.assert_close(executor.run([y])[0], model(y))
    assert sum(call[0] == "begin" for call in driver.log) == 3  # two layouts, and once more since x has moved


def test_weights_that_change_are_laid_out_at_every_call():
    run = SelectedConvolution(torch.conv2d, has_constant_weight=False, layout="channels last")
    fixed = SelectedConvolution(torch.conv2d, has_constant_weight=True, layout="channels last")
    x, weight = torch.randn(1, 3, 5, 5), torch.randn(2, 3, 3, 3)
    first = run(x, weight)
    assert torch.equal(fixed(x, weight), first)
    weight.mul_(2)
    torch.testing.assert_close(run(x, weight), first * 2)
    assert torch.backends.cudnn.enabled
