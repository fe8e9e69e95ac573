"""``mlsys batchmaker knee`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import networkx as nx
import pytest
from mlsys_core.cli.main import run

SMALL = ["batchmaker", "knee", "--hidden", "8", "--batch-sizes", "1,2,4", "--threads", "1", "--repeats", "2"]


def test_table(capsys: pytest.CaptureFixture[str]):
    assert run(SMALL) == 0
    out = capsys.readouterr().out
    assert out.count("<- b_max") == 1
    assert "of the best throughput" in out


def test_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plot = tmp_path / "knee.svg"
    assert run([*SMALL, "--json", "--plot", str(plot), "--fraction", "1.0"]) == 0
    report = json.loads(capsys.readouterr().out)
    (profile,) = report["table"]["units"]
    rates = [size / seconds for size, seconds in zip(profile["batch_sizes"], profile["seconds"], strict=True)]
    assert report["b_max"] == profile["batch_sizes"][rates.index(max(rates))]
    assert report["environment"]["cores"]
    assert run([*SMALL, "--json", "--fraction", "0.0001"]) == 0
    assert json.loads(capsys.readouterr().out)["b_max"] == 1
    assert "throughput (cells/s)" in plot.read_text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--batch-sizes", "1,x"], "write whole numbers with commas"),
        (["--batch-sizes", "2,1"], "rising"),
        (["--batch-sizes", "0,1"], "integers of 1 or more"),
        (["--fraction", "1.5"], "--fraction 1.5"),
        (["--plot", "knee.gif"], "a figure cannot be written as 'knee.gif'"),
        (["--hidden", "0"], "Invalid value for '--hidden'"),
    ],
)
def test_errors_are_one_line(options: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert run([*SMALL, *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert captured.err.strip().count("\n") == 0


def test_explain_shows_cells_and_writes_the_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    written = tmp_path / "tree.graphml"
    assert run(["batchmaker", "explain", "tree-lstm", "--hidden", "8", "--graph", str(written)]) == 0
    out = capsys.readouterr().out
    assert "h_left: float32[8]" in out
    assert "unfolds to 3 leaf, 2 inner." in out
    assert sorted(nx.get_node_attributes(nx.read_graphml(written), "cell").values()) == ["inner"] * 2 + ["leaf"] * 3
    assert run(["batchmaker", "save", "lstm", str(tmp_path / "lstm"), "--hidden", "8"]) == 0
    assert run(["batchmaker", "explain", str(tmp_path / "lstm")]) == 0
    assert "unfolds to" in capsys.readouterr().out
    assert run(["batchmaker", "explain", "lstm", "--graph", str(tmp_path / "tree.gif")]) == 2
    assert "a graph cannot be written as 'tree.gif'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--executor", "both"], "--executor 'both': give chunk or cell"),
        (["--lookahead", "two"], "--lookahead 'two': give speculative or one"),
        (["--compiler", "none"], "no compiler is called 'none'"),
    ],
)
def test_serve_refuses_unknown_choices_before_it_loads_a_model(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    assert run(["batchmaker", "serve", str(tmp_path), "--port", "0", *options]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert says in told[-1]
    assert len(told) == 2  # the settings, and the refusal
    assert f"models = {tmp_path}" in told[0]  # under the name that all serve commands have
