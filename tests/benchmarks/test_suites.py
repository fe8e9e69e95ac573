"""Suites without a file of tests at their smallest: each runs, its results are right, its figures are JSON."""

from __future__ import annotations

import io
import json
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
    "nimble-training": {"nets": ("transformer",)},
    "orca-soak": {},
    "dvabatch-soak": {"policies": ("input", "load-literal")},
}


@pytest.mark.parametrize("name", SMALL)
def test_a_suite_at_its_smallest(name: str, tmp_path: Path):
    context = BenchContext(Console(file=io.StringIO()), True, "cpu", num_threads=1, output_dir=tmp_path)
    section = run_suite(find_suite(name), context, **SMALL[name])
    assert section.status == "ok"
    assert json.loads((tmp_path / f"{name}.json").read_text())["results"]
