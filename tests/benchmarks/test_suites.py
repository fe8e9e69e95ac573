"""Suites without a file of tests at their smallest: each runs, its results are right, its figures are JSON."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from mlsys_core.bench import BenchContext, run_suite
from mlsys_core.cli.bench import find_suite
from rich.console import Console

pytestmark = pytest.mark.slow

SMALL = {
    "core-serving-loop": {},
    "core-recorder": {},
    "core-memory-plan": {},
    "core-oip-front": {},
    "serve-peers": {"peers": (), "clients": 2},
    "nimble-kernels": {"nets": ("resnet20_cifar",)},
    "nimble-training": {"nets": ("transformer",)},
    "nimble-overhead": {},
    "nimble-weights": {"nets": ("mlp",)},
    "nimble-exactness": {"nets": ("mlp",)},
    "nimble-streams": {},
    "orca-native": {},
    "orca-stalls": {"streams": 2},
    "orca-soak": {},
    "score-cost": {},
    "orca-control": {},
    "dvabatch-soak": {"policies": ("input", "load-literal")},
}


FORKS = ("orca-parity",)  # only a process with a single thread may: in one of their own


@pytest.mark.parametrize("name", FORKS)
def test_a_suite_that_forks_at_its_smallest(name: str, tmp_path: Path):
    command = [sys.executable, "-m", "mlsys_core", "bench", name, "only=t5", "--quick", "--threads", "1"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / f"{name}.json").read_text())["results"]


@pytest.mark.parametrize("name", SMALL)
def test_a_suite_at_its_smallest(name: str, tmp_path: Path):
    context = BenchContext(Console(file=io.StringIO()), True, "cpu", num_threads=1, output_dir=tmp_path)
    section = run_suite(find_suite(name), context, **SMALL[name])
    assert section.status == "ok"
    assert json.loads((tmp_path / f"{name}.json").read_text())["results"]
