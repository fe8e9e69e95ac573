"""``mlsys nimble explain`` and ``nets`` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import networkx as nx
import pytest
from mlsys_core.cli.main import run
from mlsys_core.profiling import read_trace
from mlsys_nimble.cli.explain import profile


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


def test_a_profile_adds_workers_and_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    written = tmp_path / "net.graphml"
    assert run(["nimble", "explain", "six-branch", "--profile", "--graph", str(written)]) == 0
    graph = nx.read_graphml(written)
    assert set(nx.get_node_attributes(graph, "workers").values()) <= {"0", "1", "0 1", "torch"}
    assert len(nx.get_node_attributes(graph, "workers")) == len(graph)
    assert min(nx.get_node_attributes(graph, "seconds").values()) > 0


def test_trace_has_every_operator(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "replay.json"
    assert run(["nimble", "explain", "mlp", "--trace", str(path), "--profile", "--threads", "2"]) == 0
    out = capsys.readouterr().out
    assert "by kind: Linear" in out
    assert "20 replays on 2 workers" in out
    spans = read_trace(path).spans
    linears = {span.name.split(" ")[0] for span in spans if "linear" in span.name}
    assert len(linears) == 17  # their activations are fused with them
    assert all(span.end_ns >= span.start_ns for span in spans)


def test_errors_say_what_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for arguments, says in [
        (["six-branchs"], "did you mean 'six-branch'"),
        (["none.pt2"], "there is no file none.pt2"),
        (["mlp", "--graph", str(tmp_path / "no" / "folder.svg")], "cannot write"),
    ]:
        assert run(["nimble", "explain", *arguments]) == 2
        assert says in capsys.readouterr().err


def ran(operator: str, begin_ns: int, end_ns: int) -> SimpleNamespace:
    return SimpleNamespace(operator=operator, begin_ns=begin_ns, end_ns=end_ns)


def test_medians_over_replays_and_sums_over_tasks():
    found = profile(
        [
            [ran("conv", 0, 10), ran("conv", 2, 8), ran("add", 10, 11)],
            [ran("conv", 100, 120), ran("conv", 100, 110), ran("add", 120, 123)],
            [ran("conv", 0, 9_000), ran("conv", 0, 1), ran("add", 9_000, 9_002)],
        ]
    )
    assert [(one.name, one.num_tasks) for one in found.operators] == [("conv", 2), ("add", 1)]
    assert found.operators[0].seconds == pytest.approx(30e-9)
    assert found.operators[1].seconds == pytest.approx(2e-9)
    assert found.elapsed_s == pytest.approx(23e-9)
    assert found.busy_s == pytest.approx(32e-9)
    assert found.by_kind({"conv": "Convolution"}) == pytest.approx({"Convolution": 30e-9, "other": 2e-9})


def test_nothing_to_profile():
    with pytest.raises(ValueError, match="no replay"):
        profile([])
    assert profile([[]]).operators == ()
