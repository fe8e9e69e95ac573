"""Suites of Orca's parts at their smallest, on a small model."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from mlsys_core.bench import BenchContext, run_suite
from mlsys_core.cli.bench import find_suite
from rich.console import Console


def run_small(name: str, model: str, tmp_path: Path) -> None:
    context = BenchContext(Console(file=io.StringIO()), True, "cpu", num_threads=1, output_dir=tmp_path)
    assert run_suite(find_suite(name), context, model=model).status == "ok"
    assert (tmp_path / f"{name}.json").exists()


@pytest.mark.parametrize("name", ["orca-startup", "orca-weights"])
def test_a_suite_on_a_tiny_model(name: str, make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    run_small(name, str(make_gguf()), tmp_path)


@pytest.mark.model
def test_a_suite_that_needs_a_real_vocabulary(tmp_path: Path) -> None:
    run_small("orca-overhead", "smollm2-135m-instruct", tmp_path)
