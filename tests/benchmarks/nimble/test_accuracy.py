"""The races in int8 and bf16: small ones whose peers may be missing, errors beside float32, losses first."""

from __future__ import annotations

import io
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from mlsys_bench.harness.race import Outcome
from mlsys_bench.nimble import accuracy, bf16, int8
from mlsys_bench.nimble.bf16 import Autocast, Halves
from mlsys_core.bench import BenchContext
from mlsys_core.report import Table
from mlsys_nimble.nets.blocks import Net
from rich.console import Console


def test_a_race_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(accuracy, "QUICK_SECONDS", 0.0)
    context = BenchContext(Console(file=io.StringIO()), True, "cpu", 1, tmp_path)
    section = int8.run(context, nets=("mlp",), peers=sys.executable)
    found = section.data["nets"]["mlp"]
    needs = {"Nimble": ("torchao",), "OpenVINO": ("openvino", "nncf"), "ONNX Runtime": ("onnxruntime", "onnx")}
    for contestant, packages in needs.items():
        one = found["cases"][f"{contestant}, static"]
        if absent := [name for name in packages if find_spec(name) is None]:
            assert one["status"] == "not installed"
            assert f"{contestant}, static: not installed (no package {absent[0]}) on mlp" in section.body
        else:
            assert one["status"] == "timed"
            assert 0 < one["accuracy"]["max_error"] < 0.5  # sixteen layers of random weights, ten results
    assert found["cases"]["Nimble, float32"]["status"] == "timed"
    assert "Nimble, dynamic" not in found["cases"]  # for nets of whole numbers
    assert section.status == "ok"


def test_inputs_are_like_the_examples():
    ids, mask = torch.tensor([[0, 7, 3]]), torch.ones(1, 3, dtype=torch.int64)
    net = Net(torch.nn.Identity(), (ids, mask))
    first, second = accuracy.drawn(net, 2, seed=2)
    assert int8.is_text(net)
    assert not int8.is_text(Net(torch.nn.Identity(), (ids, torch.ones(1))))
    assert all(set(each[0].flatten().tolist()) <= set(range(8)) for each in (first, second))
    assert torch.equal(first[1], mask)
    assert torch.equal(accuracy.drawn(net, 1, seed=2)[0][0], first[0])


def test_errors_of_known_results():
    wanted = torch.tensor([[1.0, -2.0], [3.0, 2.0]])
    got = torch.tensor([[1.0, -1.0], [2.0, 2.5]])
    assert accuracy.errors([([got], [wanted])]) == {
        "max_error": pytest.approx(1 / 3),
        "mean_error": pytest.approx(2.5 / 8),
        "top1": 0.5,
    }
    assert accuracy.distance([got], [wanted]) == pytest.approx((1 + 1 + 0.25) ** 0.5 / 18**0.5)
    assert accuracy.distance([got[:1]], [wanted]) == float("inf")


def test_another_net_than_eagers_is_off():
    assert not int8.is_off({"from_eager": 0.019, "eager_moved": 0.001})
    assert int8.is_off({"from_eager": 0.021, "eager_moved": 0.001})
    assert not int8.is_off({"from_eager": 0.08, "eager_moved": 0.04})
    assert not int8.is_off({})


def timed(seconds: float) -> Outcome:
    return Outcome("timed", turns_s=((seconds,) * 3,) * 2)


def test_losses_lead_and_the_best_peer_may_have_another_form():
    won = {"Nimble, float32": timed(4.0), "Nimble, static": timed(1.0), "OpenVINO, static": timed(2.0)}
    lost = {"Nimble, static": timed(2.0), "Nimble, dynamic": timed(4.0), "ONNX Runtime, dynamic": timed(1.0)}
    found = {"won": {"Nimble, static": {"max_error": 0.1, "mean_error": 0.01, "top1": 1.0}}, "lost": {}}
    section = accuracy.report(int8.FORMS, {"won": won, "lost": lost}, found, 2, {})
    table = section.body[0]
    assert isinstance(table, Table)
    assert [list(row) for row in table.rows] == [
        ["lost", "Nimble, dynamic", "ONNX Runtime, dynamic", "1e+03", "4e+03", "0.25x", "-"],
        ["lost", "Nimble, static", "ONNX Runtime, dynamic", "1e+03", "2e+03", "0.50x", "-"],
        ["won", "Nimble, static", "OpenVINO, static", "2e+03", "1e+03", "2.00x", "4.00x"],
    ]
    assert section.data["over_best_peer"] == pytest.approx(1.0)


def test_eagers_own_sensitivity_is_found_with_whole_inputs_too() -> None:
    table = torch.nn.Embedding(8, 16)
    before = table.weight.clone()
    with torch.no_grad():
        found = int8._beside_eager(lambda ids: [2 * table(ids)], table, (torch.arange(4),))
    assert found["from_eager"] == pytest.approx(1.0)
    assert 0 < found["eager_moved"] < 1e-5
    assert torch.equal(table.weight, before)


def test_a_race_has_errors_and_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "QUICK_SECONDS", 0.0)
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
    won = {"Nimble, float32": timed(4.0), "Nimble, bf16 pairs": timed(1.0), "OpenVINO, bf16": timed(2.0)}
    lost = {"Nimble, bf16 pairs": timed(2.0), "eager, autocast": timed(1.5), "OpenVINO, float32": timed(1.0)}
    section = accuracy.report(bf16.FORMS, {"won": won, "lost": lost}, {"won": {}, "lost": {}}, 2, {})
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
