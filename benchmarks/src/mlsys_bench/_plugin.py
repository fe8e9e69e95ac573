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
        BenchmarkSpec(
            name="windtunnel-infer",
            help="Exact inference against scikit-learn, LightGBM, ONNX Runtime, Hummingbird and treelite.",
            run="mlsys_bench.windtunnel.infer:run",
        ),
        BenchmarkSpec(
            name="windtunnel-tables",
            help="The experiments of the dissertation's section 5.4; also mlsys windtunnel bench.",
            run="mlsys_bench.windtunnel.tables:run",
        ),
        BenchmarkSpec(
            name="windtunnel-search",
            help="Sets of fine-tuning options, by validation rows alone.",
            run="mlsys_bench.windtunnel.search:run",
        ),
        BenchmarkSpec(
            name="windtunnel-training",
            help="Rows a second of a training step, the kernel beside torch.",
            run="mlsys_bench.windtunnel.training:run",
        ),
    ]
