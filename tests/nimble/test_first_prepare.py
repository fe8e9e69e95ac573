"""A first preparation brings none of torch's compiler with it, which takes seconds; a compiled function still works."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from mlsys_nimble import Nimble
from torch import nn

HEAVY = ("torch._dynamo", "torch._inductor", "sympy")


def test_a_first_preparation_imports_no_compiler() -> None:
    code = f"""
import sys
from mlsys_nimble import Nimble
from mlsys_nimble.nets import net
found = net("resnet20-cifar")
Nimble(found.module).prepare(found.inputs)
sys.exit(", ".join(name for name in {HEAVY} if name in sys.modules) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_compiled_part_is_captured_as_what_it_computes() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = nn.Sequential(torch.compile(inner, backend="eager"), nn.Linear(4, 2)).eval()
    x = torch.randn(3, 4)
    with torch.inference_mode():
        expected = model(x)
    torch.testing.assert_close(Nimble(model).prepare((x,))(x), expected)


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(3, 1), (1, 4)], (3, 4)),
        ([(0,), (1,)], (0,)),
        ([(), (2, 3)], (2, 3)),
        ([torch.Size([5]), [2, 1]], (2, 5)),
    ],
)
def test_shapes_broadcast_as_in_torch(shapes: list[tuple[int, ...]], expected: tuple[int, ...]) -> None:
    from mlsys_nimble.capture.builder import broadcast

    assert broadcast(*shapes) == expected == tuple(torch.broadcast_shapes(*shapes))
