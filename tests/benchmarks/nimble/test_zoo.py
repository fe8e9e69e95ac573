"""The zoo's race: its nets by name, a net that fails beside others, losses first."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from mlsys_bench.harness.machine import busy_processes
from mlsys_bench.harness.race import Outcome
from mlsys_bench.nimble import races, zoo, zoo_nets
from mlsys_bench.nimble.papers import check_model
from mlsys_core.bench import BenchContext
from mlsys_core.errors import InvalidInputError, MlsysError
from mlsys_core.report import Table
from mlsys_nimble import Nimble
from rich.console import Console


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


def test_busy_processes_end_with_their_company():
    others = set(psutil.Process().children())
    with busy_processes(2):
        busy = set(psutil.Process().children()) - others
    assert busy
    assert not any(process.is_running() for process in busy)


def test_a_race_alone_and_in_company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(zoo, "TURN_S", 0.0)
    monkeypatch.setattr(
        zoo, "ZOO_MAKERS", {name: zoo.ZOO_MAKERS[name] for name in ("eager", "torch.compile", "Nimble")}
    )
    found = zoo.race_net(
        f"{zoo_nets.__name__}:tower", 0.0, True, num_threads=1, cache_dir=str(tmp_path), trust_code=False
    )
    assert list(found) == list(zoo.COMPANY)
    assert all(one["Nimble"]["status"] == "timed" for one in found.values())
    assert all(one["torch.compile"]["status"] == "left out" for one in found.values())


def outcomes(ours: float, theirs: float) -> dict[str, Any]:
    return {"Nimble": {"status": "timed", "turns_s": [[ours]]}, "OpenVINO": {"status": "timed", "turns_s": [[theirs]]}}


def quick(folder: Path, *, num_threads: int = 1) -> BenchContext:
    return BenchContext(Console(file=io.StringIO()), True, "cpu", num_threads, folder)


def test_a_net_that_fails_is_named_and_losses_lead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    speeds = {"mlp": (1.0, 2.0), "gru": (2.0, 1.0)}

    def race(_: str, arguments: dict[str, Any], **__: Any) -> Any:
        name = arguments["model"]
        if name not in speeds:
            raise MlsysError("it ended")
        return {company: outcomes(*speeds[name]) for company in zoo.COMPANY}

    monkeypatch.setattr(races, "run_in_child", race)
    section = zoo.run(quick(tmp_path), nets=("mlp", "lstm", "gru"))
    table = section.body[0]
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == ["lstm", "gru", "gru", "mlp", "mlp"]
    assert section.status == "failed"
    assert "Nimble: does not run (it ended) on lstm" in section.body
    assert section.data["means"]["alone"]["over_best_peer"] == pytest.approx(1.0)
    assert zoo.ratios({name: Outcome(**fields) for name, fields in outcomes(2.0, 1.0).items()}) == (0.5, 0.5)


def test_a_run_that_was_cut_goes_on_with_the_nets_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    raced: list[str] = []
    cuts = [KeyboardInterrupt]

    def race(_: str, arguments: dict[str, Any], **__: Any) -> Any:
        if arguments["model"] == "gru" and cuts:
            raise cuts.pop()
        raced.append(arguments["model"])
        return {company: outcomes(2.0, 1.0) for company in zoo.COMPANY}

    monkeypatch.setattr(races, "run_in_child", race)
    with pytest.raises(KeyboardInterrupt):
        zoo.run(quick(tmp_path), nets=("mlp", "gru", "lstm"))
    written = json.loads((tmp_path / "nimble-zoo.json").read_text())["results"]
    assert list(written["nets"]) == ["mlp"]
    with pytest.raises(InvalidInputError, match="another setting"):
        zoo.run(quick(tmp_path, num_threads=2), nets=("mlp",))
    section = zoo.run(quick(tmp_path), nets=("mlp", "gru", "lstm"))
    assert raced == ["mlp", "gru", "lstm"]
    assert section.data["nets"]["mlp"] == written["nets"]["mlp"]
    assert list(section.data["loads"]) == ["mlp", "gru", "lstm"]
    assert not (tmp_path / "nimble-zoo.jsonl").exists()  # all are done
