"""Registers the suites of ``mlsys bench``; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import BenchmarkSpec


@hookimpl
def mlsys_register_benchmarks() -> Iterable[BenchmarkSpec]:
    """Return all suites, by subsystem."""
    return [
        BenchmarkSpec(
            name="nimble",
            help="Nets of chapter 3 against eager, torch.compile, AOTInductor, ONNX Runtime and OpenVINO.",
            run="mlsys_bench.nimble.nets:run",
            devices=("cpu", "cuda"),
        ),
    ]
