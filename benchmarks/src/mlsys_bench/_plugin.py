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
        BenchmarkSpec(
            name="batchmaker",
            help="The BatchMaker paper's figures: cellular against request-level batching.",
            run="mlsys_bench.batchmaker.suite:run",
        ),
        BenchmarkSpec(
            name="batchmaker-loops",
            help="A step of the compiled loops by rows, beside nn.LSTM.",
            run="mlsys_bench.batchmaker.loops:run",
        ),
        BenchmarkSpec(
            name="batchmaker-words",
            help="Words to phonemes, cellular against bucketed batching.",
            run="mlsys_bench.batchmaker.words:run",
        ),
        BenchmarkSpec(
            name="batchmaker-trees",
            help="Tree-LSTM against DyNet, per-height batching and the ideal graph.",
            run="mlsys_bench.batchmaker.trees:run",
        ),
        BenchmarkSpec(
            name="batchmaker-workers",
            help="Two workers against one, on real threads.",
            run="mlsys_bench.batchmaker.workers:run",
        ),
        BenchmarkSpec(
            name="batchmaker-scheduling",
            help="CPU time of scheduling a cell.",
            run="mlsys_bench.batchmaker.scheduling:run",
        ),
        BenchmarkSpec(
            name="dvabatch",
            help="DVABatch's Figures 14 to 21: policies against ZeroBatch, DelayBatch and the best static batch.",
            run="mlsys_bench.dvabatch.suite:run",
        ),
        BenchmarkSpec(
            name="dvabatch-ideal",
            help="The largest gain of letting requests join a batch, by costs.",
            run="mlsys_bench.dvabatch.ideal:run",
        ),
        BenchmarkSpec(
            name="dvabatch-over-http",
            help="Running servers over HTTP under Poisson arrivals.",
            run="mlsys_bench.dvabatch.over_http:run",
        ),
    ]
