"""The training benchmark: transformers' nets give eager's gradients, and a run that was cut goes on."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mlsys_bench.nimble import training
from mlsys_core.bench import BenchContext
from rich.console import Console

SMALL = {
    "vit": partial(
        training.vit,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
        image_size=32,
    ),
    "gpt2": partial(training.gpt2, n_embd=32, n_layer=1, n_head=2, vocab_size=50),
}


@pytest.mark.parametrize("name", SMALL)
def test_gradients_are_compared_before_steps_are_timed(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(training.NETS, name, SMALL[name])
    rows = training.race(name, cases=training.QUICK_CASES, batch=2, seconds=0.0, clock=iter(range(10**6)).__next__)
    assert [row.case for row in rows] == ["eager", "Nimble"]
    assert all(row.difference < 1e-4 for row in rows)


def test_a_run_that_was_cut_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    raced: list[str] = []
    cuts = [KeyboardInterrupt]

    def race(name: str, **_: Any) -> list[training.Row]:
        if name == "transformer" and cuts:
            raise cuts.pop()
        raced.append(name)
        return [training.Row(name, "eager", 4, 1e-7, 2.0, 1.5, 1.0)]

    monkeypatch.setattr(training, "race", race)
    context = BenchContext(Console(file=io.StringIO()), False, "cpu", torch.get_num_threads(), tmp_path)
    nets = ("resnet20-cifar", "transformer")
    with pytest.raises(KeyboardInterrupt):
        training.run(context, nets=nets)
    section = training.run(context, nets=nets)
    assert raced == ["resnet20-cifar", "transformer"]
    assert [row["net"] for row in section.data["rows"]] == list(nets)
    assert not list(tmp_path.iterdir())  # all are done
