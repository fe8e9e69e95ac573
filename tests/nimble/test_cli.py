"""``mlsys nimble streams`` as a user meets it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import networkx as nx
import pytest
import torch
from mlsys_core.cli.main import run
from mlsys_core.demo import DemoContext
from mlsys_core.report import Figure, Table
from mlsys_nimble.cli import demo
from rich.console import Console

DIAMOND = {
    "nodes": ["in", "left<1>", "right", "out"],
    "edges": [["in", "left<1>"], ["in", "right"], ["left<1>", "out"], ["right", "out"], ["in", "out"]],
}


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    file = tmp_path / "diamond.json"
    file.write_text(json.dumps(DIAMOND))
    return file


def test_tables(graph_file: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["nimble", "streams", str(graph_file)]) == 0
    out = capsys.readouterr().out
    assert "2 = 4 - 2" in out
    assert "in, left<1>, out" in out


def test_json(graph_file: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["nimble", "streams", str(graph_file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "nodes": 4,
        "edges": 5,
        "meg_edges": 4,
        "degree_of_logical_concurrency": 2,
        "streams": [["in", "left<1>", "out"], ["right"]],
        "synchronizations": [["in", "right"], ["right", "out"]],
    }


@pytest.mark.parametrize("option", ["--graph", "--svg"])
def test_graph_is_written(graph_file: Path, tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]):
    written = tmp_path / "diamond.graphml"
    assert run(["nimble", "streams", str(graph_file), option, str(written)]) == 0
    assert f"wrote {written}" in capsys.readouterr().out.replace("\n", "")
    graph = nx.read_graphml(written)
    assert set(graph.edges) == {(one, other) for one, other in DIAMOND["edges"]}
    assert nx.get_node_attributes(graph, "stream") == {"in": 0, "left<1>": 0, "right": 1, "out": 0}
    waits = {edge for edge, waits in nx.get_edge_attributes(graph, "synchronises").items() if waits}
    assert waits == {("in", "right"), ("right", "out")}
    redundant = {edge for edge, is_one in nx.get_edge_attributes(graph, "is_redundant").items() if is_one}
    assert redundant == {("in", "out")}


def test_errors_are_one_line(tmp_path: Path, graph_file: Path, capsys: pytest.CaptureFixture[str]):
    cyclic = tmp_path / "cyclic.json"
    cyclic.write_text('{"nodes": ["a", "b"], "edges": [["a", "b"], ["b", "a"]]}')
    for arguments, says in [
        ([str(cyclic)], "has a cycle: 'a' -> 'b' -> 'a'"),
        ([str(tmp_path / "none.json")], "No such file"),
        ([str(graph_file), "--graph", str(tmp_path / "no" / "folder.svg")], "cannot write"),
        ([str(graph_file), "--graph", str(tmp_path / "graph.gif")], "end the name in .graphml, .dot"),
    ]:
        assert run(["nimble", "streams", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert says in captured.err
        assert captured.err.count("\n") == 1


def test_a_graph_too_large_to_draw_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "large.json"
    file.write_text(json.dumps({"nodes": [f"op{i}" for i in range(1001)], "edges": []}))
    assert run(["nimble", "streams", str(file), "--graph", str(tmp_path / "large.svg")]) == 2
    assert "cannot draw 1001 nodes" in capsys.readouterr().err
    assert not (tmp_path / "large.svg").exists()


def test_it_compares_times_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "NETS", ("six-branch",))
    monkeypatch.setattr(demo, "BUDGET_S", 0.0)
    console = Console(file=io.StringIO(), width=200)
    threads = torch.get_num_threads()
    section = demo.run(DemoContext(console, tmp_path, num_threads=1, output_dir=tmp_path))
    assert torch.get_num_threads() == threads
    assert section.status == "ok"
    assert section.data["difference"] <= 1e-5
    assert section.data["six-branch"]["degree_of_logical_concurrency"] == 6
    assert any(isinstance(item, Table) for item in section.body)
    assert sum(isinstance(item, Figure) for item in section.body) == 1
