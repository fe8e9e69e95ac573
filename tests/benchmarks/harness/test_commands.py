"""``mlsys SUBSYSTEM bench``: which suite it runs, with which options."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlsys_bench.harness import commands
from mlsys_core.cli.main import run


@pytest.mark.parametrize(
    ("line", "suite", "options"),
    [
        ("orca bench", "orca-paper", []),
        ("orca bench peers dtype=fp32", "orca-peers", ["dtype=fp32"]),
        ("nimble bench nets=darts,lstm", "nimble", ["nets=darts,lstm"]),
        ("nimble bench nimble-zoo", "nimble-zoo", []),
        ("windtunnel bench only=source seeds=1", "windtunnel-tables", ["only=source", "seeds=1"]),
        ("batchmaker bench", "batchmaker", []),
        ("dvabatch bench over-http", "dvabatch-over-http", []),
    ],
)
def test_a_subsystems_bench_is_bench_with_its_suites(line, suite, options, monkeypatch):
    calls = []
    monkeypatch.setattr(commands, "bench", lambda *args, **options: calls.append((*args, options)))
    assert run([*line.split(), "--quick", "-o", "there"]) == 0
    kept = {"quick": True, "device": "cpu", "threads": 2, "out": Path("there")}
    assert calls == [(suite, options, kept)]
