"""``mlsys bench``: options of suites by name, and tables that a terminal of 80 columns shows whole."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlsys_core.bench import print_section, read_options, split_columns
from mlsys_core.cli.main import run
from mlsys_core.errors import InvalidInputError
from mlsys_core.plugins.specs import BenchmarkSpec
from mlsys_core.report import Section, Table
from rich.console import Console


def suite(context, *, nets=("a", "b"), loads=(0.5,), rounds=3, share=0.5, name=None, is_loaded=False):
    raise NotImplementedError


SPEC = BenchmarkSpec(name="some", help="x", run=f"{__name__}:suite")


@pytest.fixture(autouse=True)
def this_module(monkeypatch: pytest.MonkeyPatch):
    registry = SimpleNamespace(part=lambda _: suite)
    monkeypatch.setattr("mlsys_core.bench.installed_plugins", lambda: SimpleNamespace(registry=registry))


def test_an_option_has_its_defaults_type():
    texts = ["nets=x,y z", "loads=1,2", "--rounds=7", "share=2", "name=n", "is-loaded=true"]
    assert read_options(SPEC, texts) == {
        "nets": ("x", "y z"),
        "loads": (1.0, 2.0),
        "rounds": 7,
        "share": 2.0,
        "name": "n",
        "is_loaded": True,
    }


@pytest.mark.parametrize("text", ["net=x", "rounds", "rounds=many", "is_loaded=perhaps"])
def test_another_option_or_value_is_refused(text: str):
    with pytest.raises(InvalidInputError, match=r"rounds=3|is_loaded=False"):
        read_options(SPEC, [text])


def test_no_heading_is_cut_at_80_columns():
    columns = ["net", *(f"contender number {number}, milliseconds" for number in range(8)), "note"]
    table = Table(columns, [["resnet50", *("1.234",) * 8, "it does not run here because of a long reason" * 2]])
    console = Console(file=io.StringIO(), width=80)
    print_section(Section("x", [table]), console)
    printed = console.file.getvalue()
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert printed.count("milliseconds") == 8
    assert all(part.columns[0] == "net" for part in split_columns(table, 79))
    assert [c for part in split_columns(table, 79) for c in part.columns[1:]] == columns[1:]


def test_a_heading_is_broken_before_a_cell(capsys: pytest.CaptureFixture[str]) -> None:
    columns = ["model", "WindTunnel columns", "WindTunnel network", "ONNX Runtime"]
    rows = [["pipeline, LogisticRegression", "1.92", "1.06", "missing"]]
    print_section(Section("x", [Table(columns, rows)]), Console(width=80))
    printed = capsys.readouterr().out
    assert "missing" in printed
    assert "Runtime" in printed


def test_an_unknown_suite_says_where_suites_are(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert run(["bench", "no-such-suite", "--out", str(tmp_path)]) != 0
    assert "pip install -e benchmarks" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_what_a_suite_has_started_and_another_does_not_interrupt_that(number: signal.Signals) -> None:
    program = """
import signal, subprocess, sys, time
from mlsys_core.cli.bench import leaving_on_signals
signal.signal(signal.SIGINT, signal.default_int_handler)
with leaving_on_signals():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        print(child.pid, flush=True)
        time.sleep(600)
    finally:
        print("ending", flush=True)
        sys.stdin.readline()
        child.kill()
        child.wait()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as running:
        assert running.stdout is not None
        child = int(running.stdout.readline())
        try:
            running.send_signal(number)
            assert running.stdout.readline() == "ending\n"
            for other in (signal.SIGTERM, signal.SIGINT):
                running.send_signal(other)
            running.communicate("now\n", timeout=600)
            assert running.returncode == (128 + number if number == signal.SIGTERM else -number)
            assert not Path(f"/proc/{child}").exists()
        finally:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
