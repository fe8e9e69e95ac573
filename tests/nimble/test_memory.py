"""Memory of prepared models: what kernels packed is not kept twice, and what is deleted goes back to the system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mlsys_core.errors import KernelUnavailableError
from mlsys_nimble import Nimble
from mlsys_nimble.backends.cpu.library import load
from torch import nn

CODE = """
import gc
from pathlib import Path
import torch
from torch import nn
from mlsys_nimble import Nimble

torch.set_num_threads(1)
layers = [part for _ in range(12) for part in (nn.Conv2d(256, 256, 3, padding=1), nn.BatchNorm2d(256))]
model = nn.Sequential(*layers).eval()
x = torch.randn(1, 256, 8, 8)
weights = sum(parameter.nbytes for parameter in model.parameters()) / 2**20

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

held = []
for turn in range(6):
    before = resident()
    prepared = Nimble(model).prepare((x,), winograd=0)
    prepared(x)
    held.append(resident() - before)
    del prepared
    print(turn, round(weights, 1), round(held[-1], 1), round(resident(), 1))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_models_prepared_and_deleted_leave_resident_memory_flat() -> None:
    try:
        load()
    except KernelUnavailableError as error:
        pytest.skip(str(error))
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    rows = [[float(cell) for cell in line.split()] for line in done.stdout.splitlines()]
    weights, kept, left = rows[0][1], [row[2] for row in rows], [row[3] for row in rows]
    assert len(rows) == 6
    assert weights > 25  # MiB
    assert max(left[1:]) - min(left[1:]) < 0.25 * weights, left
    assert max(kept[1:]) < 1.6 * weights, kept  # the packed weights, and neither the folded ones nor another copy


def test_released_constants_have_a_shape_and_no_memory() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    x = torch.randn(1, 3, 8, 8)
    with torch.inference_mode():
        expected = model(x)
    prepared = Nimble(model).prepare((x,), executor="native")
    torch.testing.assert_close(prepared(x), expected, atol=1e-5, rtol=1e-5)
    with torch.inference_mode():  # a changed weight is seen, though its packed copy is all that was read
        model[0].weight.mul_(2)
        expected = model(x)
    torch.testing.assert_close(prepared(x), expected, atol=1e-5, rtol=1e-5)


def test_a_constant_that_is_also_read_in_place_or_returned_stays() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            folded = self.weight * 2  # made of constants alone
            return nn.functional.linear(x, folded), x + folded, folded

    model, x = Tied().eval(), torch.randn(16, 16)
    with torch.inference_mode():
        expected = model(x)
    for got, wanted in zip(Nimble(model).prepare((x,))(x), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "convolution", "depthwise", "separable"])
def test_a_folded_residual_keeps_its_memory(kind: str) -> None:
    """Kernels pack weights, not what they add to their results; vit-pytorch's CaiT read freed memory."""
    x = torch.randn(2, 16) if kind == "linear" else torch.randn(2, 16, 8, 8)
    model = _Added(kind, x).eval()
    with torch.no_grad():
        prepared = Nimble(model).prepare(x)
        program = prepared.prepared.program
        residuals = [
            o.inputs[-1] for o in program.operators if hasattr(o.kind, "epilogue") and o.kind.epilogue.has_residual
        ]
        assert residuals
        assert all(program.constants[value].device.type == "cpu" for value in residuals if value in program.constants)
        torch.testing.assert_close(prepared(x), model(x), rtol=1e-4, atol=1e-5)


class _Added(nn.Module):
    def __init__(self, kind: str, x: torch.Tensor) -> None:
        super().__init__()
        depthwise, pointwise = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 16, 1)
        nets = {
            "linear": nn.Linear(16, 16),
            "convolution": pointwise,
            "depthwise": depthwise,
            "separable": nn.Sequential(depthwise, nn.ReLU(), pointwise),
        }
        self.net, self.shape = nets[kind], x.shape
        self.added = nn.Parameter(torch.randn(1, 16, *(1,) * (x.dim() - 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) + (self.added * 2).expand(self.shape)
