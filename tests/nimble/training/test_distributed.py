"""Two ranks under DistributedDataParallel: each replays its own graphs, gradients are averaged outside of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

RANK = """
import sys, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from mlsys_nimble import Nimble

store, rank, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
trained = DistributedDataParallel(Nimble(model).prepare(torch.zeros(3, 6), training=True))
for step in range(2):
    model.zero_grad()
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    trained(x).square().sum().backward()
torch.save([parameter.grad for parameter in model.parameters()], out)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed part")
def test_gradients_are_the_mean_over_ranks(tmp_path: Path):
    outs = [tmp_path / f"rank{rank}.pt" for rank in range(2)]
    commands = [[sys.executable, "-c", RANK, str(tmp_path / "store"), str(r), str(out)] for r, out in enumerate(outs)]
    children = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for child in children:
        _, errors = child.communicate()
        assert child.returncode == 0, errors[-3000:]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    for rank in range(2):
        model(torch.randn(3, 6, generator=torch.Generator().manual_seed(10 + rank))).square().sum().backward()
    for out in outs:
        for made, parameter in zip(torch.load(out), model.parameters(), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(made, parameter.grad / 2)
