"""Suites of Orca's parts at their smallest, on a small model."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

from mlsys_core.bench import BenchContext, run_suite
from mlsys_core.cli.bench import find_suite
from rich.console import Console


def run_small(name: str, tmp_path: Path, **options: object) -> None:
    context = BenchContext(Console(file=io.StringIO()), True, "cpu", num_threads=1, output_dir=tmp_path)
    assert run_suite(find_suite(name), context, **options).status == "ok"
    assert (tmp_path / f"{name}.json").exists()


def test_weights_on_a_tiny_model(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    run_small("orca-weights", tmp_path, model=str(make_gguf()))
