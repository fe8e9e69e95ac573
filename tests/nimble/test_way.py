"""The page ``docs/ways/tensor.md`` lists the files that a prepared call passes, from the module to the kernels."""

from __future__ import annotations

import torch
from mlsys_nimble import Nimble
from torch import nn

from tests.ways import ROOT, files_of_page, files_passed, num_lines

PAGE = "docs/ways/tensor.md"


def test_a_tensors_way():
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4)).eval()
    x = torch.ones(2, 64)
    model = Nimble(net).prepare(x, executor="native", num_threads=1, weights="bytes")
    model(x)
    passed = files_passed(lambda: model(x))
    assert sorted(files_of_page(PAGE)) == sorted(passed)
    assert f"{len(passed)} Python files" in (ROOT / PAGE).read_text()
    assert num_lines(passed) < 3000
