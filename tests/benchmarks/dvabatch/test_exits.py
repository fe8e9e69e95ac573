"""The suite of early exits at its smallest: an untrained net, whose exits and accuracy can be computed apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from mlsys_bench.dvabatch import exits
from mlsys_bench.dvabatch.exit_subjects import Subject
from mlsys_dvabatch.serve.preparing import Batching, prepare
from mlsys_serving.certainty import certainty
from torch import Tensor, nn


class Heads(nn.Module):
    """Two layers, a head behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = torch.relu(layer(x))
            found.append(head(x) * 4)
        return tuple(found)


def test_rows_are_what_the_rule_says(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = Heads().eval(), torch.export.Dim("batch", min=1, max=64)
    x = torch.randn(30, 6)
    program = torch.export.export(model, (x[:2],), dynamic_shapes=({0: batch},))
    torch.export.save(program, tmp_path / "heads.pt2")
    labels = torch.randint(0, 3, (30,)).numpy()
    subject = Subject("Heads, two", tmp_path / "heads.pt2", [(row.numpy(),) for row in x], labels, "noise")
    prepared = prepare(str(subject.file), tmp_path, Batching(policy="early-exit", max_batch_size=4))
    with torch.no_grad():
        first, last = (head.numpy() for head in model(x))
    rows = []
    for rule, at_least in (("confidence", 1.0), ("confidence", 0.6), ("margin", 0.3)):
        row = exits.measured(prepared, subject, rule, at_least)
        leaves = certainty(first, rule) >= at_least
        answers = np.where(leaves[:, None], first, last).argmax(1)
        assert row["exits"] == pytest.approx([leaves.mean(), 1 - leaves.mean()])
        assert row["accuracy"] == (answers == labels).mean()
        rows.append({"rule": rule, "at_least": at_least, **row})
    assert 0 < rows[1]["exits"][0] < 1
