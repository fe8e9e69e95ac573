from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mlsys_core.cli.trace import app
from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling import Recorder, write_trace
from typer.testing import CliRunner


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    now = [0]
    recorder = Recorder(clock_ns=lambda: now[0], max_events=8)
    recorder.instant("lost")
    for number in range(3):
        recorder.complete("prefill", number * 1000, number * 1000 + 900, request=number)
        recorder.complete("attention [1/2]", number * 1000 + 100, number * 1000 + 400)
    now[0] = 1500
    recorder.instant("preempted")
    recorder.count("queue", 4)
    path = tmp_path / "run.json.gz"
    write_trace(recorder.recording(), path)
    return path


def run(*arguments: Any) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_summary_as_a_table(trace: Path) -> None:
    lines = run("summary", trace).splitlines()
    assert lines[0].rstrip() == "events: 8 (instants: 1), wall time: 2.9 µs"
    assert "dropped events: 1, as a buffer was full" in lines[1]
    (prefill,) = [line for line in lines if "prefill" in line]
    cells = [cell.strip() for cell in prefill.split("│")[1:-1]]
    assert cells == ["prefill", "3", "2.7 µs", "1.8 µs", *["900 ns"] * 5, "93.1%"]
    assert any("attention [1/2]" in line for line in lines), "names in brackets are no markup"
    (queue,) = [line for line in lines if "queue" in line]
    assert [cell.strip() for cell in queue.split("│")[3:-1]] == ["1", "4", "4", "4"]


def test_summary_as_json_sorted_and_limited(trace: Path) -> None:
    document = json.loads(run("summary", trace, "--json", "--sort", "count", "--limit", "1"))
    assert [row["name"] for row in document["spans"]] == ["attention [1/2]"], "names break ties"
    assert document["spans"][0]["duration_s"]["p99"] == pytest.approx(300e-9)
    assert (document["dropped"], document["num_events"]) == (1, 8)
    document = json.loads(run("summary", trace, "--json"))
    assert [row["name"] for row in document["spans"]] == ["prefill", "attention [1/2]"]


def test_a_limit_says_what_it_left_out(trace: Path) -> None:
    output = run("summary", trace, "--limit", "1")
    assert "attention" not in output
    assert "and 1 more span names" in output


def test_errors_are_mlsys_errors(tmp_path: Path) -> None:
    def failing(*arguments: Any) -> BaseException | None:
        return CliRunner().invoke(app, [str(argument) for argument in arguments]).exception

    (tmp_path / "notes.txt").write_text("no trace")
    assert isinstance(failing("summary", tmp_path / "notes.txt"), InvalidInputError)
    assert isinstance(failing("summary", tmp_path / "absent.json"), InvalidInputError)


def test_wrong_options_are_usage_errors(trace: Path) -> None:
    for arguments in (["summary", trace, "--sort", "mean"], ["summary", trace, "--limit", "0"], ["summary"]):
        assert CliRunner().invoke(app, [str(argument) for argument in arguments]).exit_code == 2


@pytest.mark.parametrize("command", [[], ["summary"], ["export"]])
def test_help_teaches_by_example(command: list[str]) -> None:
    assert "Example: mlsys trace" in " ".join(run(*command, "--help").split())


def test_the_command_module_imports_nothing_heavy() -> None:
    code = "import sys, mlsys_core.cli.trace; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert "mlsys_core.cli.trace" in loaded
    assert loaded.isdisjoint({"torch", "numpy", "fastapi", "matplotlib", "sklearn", "mlsys_core.profiling"})


def test_export_by_the_cores_own_exporter(trace: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    assert f"wrote {again}" in run("export", trace, again, "--to", "chrome-trace").replace("\n", "")
    assert len(json.loads(again.read_text())["traceEvents"]) > 8


def test_export_refuses_an_unknown_name_the_file_itself_and_a_folder_that_is_not_there(trace: Path) -> None:
    for arguments, said in (
        (("export", trace, "x.csv", "--to", "cvs"), r"no exporter is called 'cvs' .there are: chrome-trace"),
        (("export", trace, trace, "--to", "chrome-trace"), "is the trace itself"),
        (("export", trace, trace.parent / "no" / "x.json", "--to", "chrome-trace"), "no folder"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            run(*arguments)
