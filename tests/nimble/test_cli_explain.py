"""``mlsys nimble explain`` and ``nets`` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import networkx as nx
import pytest
from mlsys_core.cli.main import run
from mlsys_core.profiling import read_trace


def test_nets_lists_every_net(capsys: pytest.CaptureFixture[str]):
    from mlsys_nimble.nets import NETS

    assert run(["nimble", "nets"]) == 0
    out = capsys.readouterr().out
    assert all(entry.name in out for entry in NETS)


def test_tables(capsys: pytest.CaptureFixture[str]):
    assert run(["nimble", "explain", "six-branch"]) == 0
    out = capsys.readouterr().out
    assert "degree of logical concurrency" in out
    assert "fold_constants" in out
    assert "memory: " in out


def test_json_and_graph_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    written = tmp_path / "net.graphml"
    assert run(["nimble", "explain", "six-branch", "--json", "--graph", str(written)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["captured"]["degree_of_logical_concurrency"] == 6
    graph = nx.read_graphml(written)
    assert nx.get_node_attributes(graph, "stream") == {each["name"]: each["stream"] for each in record["operators"]}
    waits = [list(edge) for edge, waits in nx.get_edge_attributes(graph, "synchronises").items() if waits]
    assert sorted(waits) == sorted(record["synchronizations"])


def test_a_trace_adds_workers_and_seconds_to_the_graph(tmp_path: Path):
    written, trace = tmp_path / "net.graphml", tmp_path / "trace.json"
    assert run(["nimble", "explain", "six-branch", "--trace", str(trace), "--graph", str(written)]) == 0
    graph = nx.read_graphml(written)
    assert set(nx.get_node_attributes(graph, "workers").values()) <= {"0", "1", "0 1", "torch"}
    assert len(nx.get_node_attributes(graph, "workers")) == len(graph)
    assert min(nx.get_node_attributes(graph, "seconds").values()) > 0


def test_trace_has_every_operator(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "replay.json"
    assert run(["nimble", "explain", "mlp", "--trace", str(path), "--threads", "2"]) == 0
    spans = read_trace(path).spans
    linears = {span.name for span in spans if "linear" in span.name}
    assert len(linears) == 17  # their activations are fused with them
    assert all(len([span for span in spans if span.name == name]) % 20 == 0 for name in linears)
    capsys.readouterr()
    assert run(["trace", "summary", str(path)]) == 0
    assert all(name in capsys.readouterr().out for name in list(linears)[:1])
    assert all(span.end_ns >= span.start_ns for span in spans)


def test_errors_say_what_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for arguments, says in [
        (["six-branchs"], "did you mean 'six-branch'"),
        (["none.pt2"], "there is no file none.pt2"),
        (["mlp", "--graph", str(tmp_path / "no" / "folder.svg")], "cannot write"),
    ]:
        assert run(["nimble", "explain", *arguments]) == 2
        assert says in capsys.readouterr().err
