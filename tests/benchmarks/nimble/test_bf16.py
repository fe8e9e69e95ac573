"""The race in bf16: a small one whose peers may be missing, errors beside eager float32."""

from __future__ import annotations

import io
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from mlsys_bench.harness.race import Outcome
from mlsys_bench.nimble import bf16
from mlsys_bench.nimble.bf16 import Autocast, Halves
from mlsys_core.bench import BenchContext
from mlsys_core.report import Table
from rich.console import Console


def test_a_race_has_errors_and_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16, "QUICK_SECONDS", 0.0)
    context = BenchContext(Console(file=io.StringIO()), True, "cpu", 1, tmp_path)
    section = bf16.run(context, nets=("mlp",), peers=sys.executable)
    cases = section.data["nets"]["mlp"]["cases"]
    for form in ("Nimble, bf16 pairs", "Nimble, bf16 weights", "eager, bf16", "eager, autocast"):
        assert cases[form]["status"] == "timed"
        assert 0 < cases[form]["accuracy"]["mean_error"] < 0.02
    assert cases["torch.compile, bf16"]["status"] == "left out"
    if find_spec("openvino") is None:
        assert "OpenVINO, bf16: not installed (no package openvino) on mlp" in section.body
    assert section.status == "ok"


def test_losses_lead_and_float32_is_no_peer() -> None:
    def timed(seconds: float) -> Outcome:
        return Outcome("timed", turns_s=((seconds,) * 3,) * 2)

    won = {"Nimble, float32": timed(4.0), "Nimble, bf16 pairs": timed(1.0), "OpenVINO, bf16": timed(2.0)}
    lost = {"Nimble, bf16 pairs": timed(2.0), "eager, autocast": timed(1.5), "OpenVINO, float32": timed(1.0)}
    section = bf16.report({"won": won, "lost": lost}, {"won": {}, "lost": {}}, 2, {})
    table = section.body[0]
    assert isinstance(table, Table)
    assert [list(row) for row in table.rows] == [
        ["lost", "Nimble, bf16 pairs", "eager, autocast", "1.5e+03", "2e+03", "0.75x", "-"],
        ["won", "Nimble, bf16 pairs", "OpenVINO, bf16", "2e+03", "1e+03", "2.00x", "4.00x"],
    ]


def test_torchs_forms_take_and_give_floats() -> None:
    torch.manual_seed(0)
    net, x = torch.nn.Linear(64, 8), torch.randn(4, 64)
    exact = net(x)
    for form in (Halves, Autocast):
        found = form(net)(x)
        assert found.dtype == torch.float32
        assert torch.equal(found, found.bfloat16().float())
        torch.testing.assert_close(found, exact, rtol=0.02, atol=0.02)
    assert net.weight.dtype == torch.float32
