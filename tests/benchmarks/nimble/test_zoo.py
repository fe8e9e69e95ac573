"""The zoo's race: its nets by name, a net that fails beside others, losses first."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from mlsys_bench.harness.race import Outcome
from mlsys_bench.nimble import cases, zoo, zoo_nets
from mlsys_core.bench import BenchContext
from mlsys_core.errors import MlsysError
from mlsys_core.report import Table
from mlsys_nimble import Nimble
from mlsys_nimble.nets.resolve import check_model
from rich.console import Console

TRUSTING = "Nimble, weights by version"


def test_twelve_named_and_forty_more():
    assert (len(zoo.NAMED), len(zoo.FORTY), len(set(zoo.NETS))) == (12, 40, 52)
    for name in zoo.NETS:
        check_model(name)


@pytest.mark.parametrize("name", ["tower", "gcn"])
def test_a_net_of_its_own_gives_what_eager_gives(name: str):
    net = getattr(zoo_nets, name)()
    with torch.no_grad():
        expected = net.module(*net.inputs)
    torch.testing.assert_close(Nimble(net.module).prepare(net.inputs)(*net.inputs), expected)


def test_a_small_world_has_its_edges():
    before = zoo_nets._watts_strogatz(16, 4, 0.75, seed=1)
    assert sum(map(len, before)) == 32
    assert all(each < node for node, those in enumerate(before) for each in those)


def test_a_race_alone_and_in_company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        cases, "ZOO_MAKERS", {name: cases.ZOO_MAKERS[name] for name in ("eager", "torch.compile", TRUSTING)}
    )
    found = zoo.race_net(f"{zoo_nets.__name__}:tower", 1, 0.0, 0.0, True, str(tmp_path), False)
    assert list(found) == list(zoo.COMPANY)
    assert all(one["Nimble"]["status"] == "timed" for one in found.values())
    assert all(one[TRUSTING]["status"] == "timed" for one in found.values())
    assert all(one["torch.compile"]["status"] == "left out" for one in found.values())


def outcomes(ours: float, theirs: float) -> dict[str, Any]:
    return {"Nimble": {"status": "timed", "turns_s": [[ours]]}, "OpenVINO": {"status": "timed", "turns_s": [[theirs]]}}


def test_a_net_that_fails_is_named_and_losses_lead(monkeypatch: pytest.MonkeyPatch):
    speeds = {"mlp": (1.0, 2.0), "gru": (2.0, 1.0)}

    def race(_: str, arguments: dict[str, Any], **__: Any) -> Any:
        name = arguments["model"]
        if name not in speeds:
            raise MlsysError("it ended")
        return {company: outcomes(*speeds[name]) for company in zoo.COMPANY}

    monkeypatch.setattr(zoo, "run_in_child", race)
    context = BenchContext(Console(file=io.StringIO()), is_quick=True, device="cpu", num_threads=1)
    section = zoo.run(context, nets=("mlp", "lstm", "gru"))
    table = section.body[0]
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == ["lstm", "gru", "gru", "mlp", "mlp"]
    assert section.status == "failed"
    assert "Nimble: does not run (it ended) on lstm" in section.body
    assert section.data["means"]["alone"]["over_best_peer"] == pytest.approx(1.0)
    assert zoo.ratios({name: Outcome(**fields) for name, fields in outcomes(2.0, 1.0).items()}) == (0.5, 0.5)
