"""Suites of Orca's parts at their smallest, on a small model."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from mlsys_core.bench import BenchContext, run_suite
from mlsys_core.cli.bench import find_suite
from rich.console import Console


def run_small(name: str, tmp_path: Path, **options: object) -> None:
    context = BenchContext(Console(file=io.StringIO()), True, "cpu", num_threads=1, output_dir=tmp_path)
    assert run_suite(find_suite(name), context, **options).status == "ok"
    assert (tmp_path / f"{name}.json").exists()


def test_weights_on_a_tiny_model(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    run_small("orca-weights", tmp_path, model=str(make_gguf()))


def test_dtypes_of_keys_and_values_on_a_tiny_model(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    run_small("orca-kv-dtypes", tmp_path, model=str(make_gguf()))
    rows = json.loads((tmp_path / "orca-kv-dtypes.json").read_text())["results"]["rows"]
    assert [row["kv_dtype"] for row in rows] == ["float32", "bfloat16", "float16", "int8"]
    assert all(abs(row["nll_change"]) < 0.01 for row in rows)
    assert rows[2]["divergence"] < rows[1]["divergence"]


def test_starts_of_a_tiny_model(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    run_small("orca-startup", tmp_path, models=(str(make_gguf()),), tokens=32)
    (row,) = json.loads((tmp_path / "orca-startup.json").read_text())["results"]["rows"]
    assert 0 < row["ready_s"] <= row["first_token_s"]
    assert 0 < row["held_mib"] <= row["peak_mib"]


@pytest.mark.model
def test_a_suite_that_needs_a_real_vocabulary(tmp_path: Path) -> None:
    run_small("orca-overhead", tmp_path, model="smollm2-135m-instruct")
