"""A small part of ``make fuzz``: some inputs of every target, each module's targets in one process of their own."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.mutate import mutated
from tests.fuzz.run import fuzz, tally_line
from tests.fuzz.target import MODULES, Input
from tests.fuzz.targets import selftest
from tests.fuzz.worker import input_of

ROOT = Path(__file__).parents[2]
RUNS = 72  # of each of 28 targets: 2,016 in all


@pytest.mark.parametrize("module", MODULES)
def test_no_parser_crashes_or_hangs(module: str, tmp_path: Path):
    names = [target.name for target in import_module(f"tests.fuzz.targets.{module}").TARGETS]
    progress = tmp_path / "progress"
    progress.write_bytes(struct.pack("<q", -1))
    command = [sys.executable, "-m", "tests.fuzz.worker", ",".join(names), "--start", "0", "--stop", str(RUNS)]
    done = subprocess.run(
        [*command, "--progress", str(progress)], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}, check=False,
    )  # fmt: skip
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr[-2000:]
    assert [
        line for line in said if line["kind"] == "crash"
    ] == []  # a hang is a matter of the machine's load: make fuzz
    finished = {line["target"]: line for line in said if line["kind"] == "done"}
    assert list(finished) == names
    for name, line in finished.items():
        assert line["refused"] + line["taken"] == RUNS, name
        assert line["growth"] < 1 << 28, name  # bytes


def test_an_input_is_a_function_of_its_number():
    seeds: list[Input] = [b'{"a": [1, 2, {"b": "c"}]}', b"GGUF\x03\0\0\0", {"x": b"1", "y.json": b"[1]"}]
    first, again = ([mutated(seeds, ("word",), Random(index)) for index in range(200)] for _ in range(2))
    assert first == again
    assert len({repr(each) for each in first}) > 150
    assert sum(each in seeds for each in first) < 20


def test_the_runner_counts_what_is_raised_what_dies_and_what_never_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("tests.fuzz.run.STUCK_S", 1.0)
    (target,) = selftest.TARGETS
    fates = [selftest.fate(input_of(target, [selftest.SEED], (), 0, index)) for index in range(60)]
    by_fate = {fate: [index for index in range(60) if fates[index] == fate] for fate in set(fates)}
    assert {"raised", "killed", "stuck", "refused", "taken"} <= set(by_fate)
    tally = fuzz(target, runs=60, seed=0)
    assert [index for index, what in tally.crashes if "KeyError" in what] == by_fate["raised"]
    assert [index for index, what in tally.crashes if "the process died (exit 3)" in what] == by_fate["killed"]
    assert [index for index, _ in tally.hangs] == by_fate["stuck"]
    assert f"{len(by_fate['stuck'])} hangs" in tally_line("selftest", tally)
