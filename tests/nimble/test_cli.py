"""``mlsys nimble streams`` as a user meets it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from mlsys_core.cli.main import run

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


def test_svg(graph_file: Path, tmp_path: Path):
    picture = tmp_path / "diamond.svg"
    assert run(["nimble", "streams", str(graph_file), "--svg", str(picture), "--json"]) == 0
    space = "{http://www.w3.org/2000/svg}"
    root = ET.parse(picture).getroot()
    lines = root.findall(f"{space}line")
    assert sorted(title.text or "" for title in root.iter(f"{space}title")) == sorted(DIAMOND["nodes"])
    assert len(lines) == 4
    assert sum("stroke-dasharray" in line.attrib for line in lines) == 2


def test_errors_are_one_line(tmp_path: Path, graph_file: Path, capsys: pytest.CaptureFixture[str]):
    cyclic = tmp_path / "cyclic.json"
    cyclic.write_text('{"nodes": ["a", "b"], "edges": [["a", "b"], ["b", "a"]]}')
    for arguments, says in [
        ([str(cyclic)], "has a cycle: 'a' -> 'b' -> 'a'"),
        ([str(tmp_path / "none.json")], "No such file"),
        ([str(graph_file), "--svg", str(tmp_path / "no" / "folder.svg")], "cannot write"),
    ]:
        assert run(["nimble", "streams", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert says in captured.err
        assert captured.err.count("\n") == 1


def test_what_is_too_large_to_draw_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "large.json"
    file.write_text(json.dumps({"nodes": [f"op{i}" for i in range(1001)], "edges": []}))
    assert run(["nimble", "streams", str(file), "--svg", str(tmp_path / "large.svg")]) == 2
    assert "cannot draw 1001 operators" in capsys.readouterr().err
    assert not (tmp_path / "large.svg").exists()
