"""What the core itself registers, through the same hooks as any plugin."""

from __future__ import annotations

from collections.abc import Iterable

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import CommandSpec, DeviceSpec, ExporterSpec, MemoryPoolSpec, PolicySpec


@hookimpl
def mlsys_register_commands() -> Iterable[CommandSpec]:
    """The commands that belong to no subsystem."""
    commands = {
        "demo": "Run each subsystem on real input and write one HTML report.",
        "doctor": "Show what this machine and installation can do, and what is missing.",
        "models": "List, fetch and locate models and data that need no hub.",
        "plugins": "List installed plugins, explain one, or write a new one.",
        "bench": "Run a benchmark suite against its peers.",
        "trace": "Summarise or view a recorded timeline.",
        "workload": "Make request traces and drive a server with them.",
    }
    return [CommandSpec(name=name, help=help_, app=f"mlsys_core.cli.{name}:app") for name, help_ in commands.items()]


@hookimpl
def mlsys_register_devices() -> Iterable[DeviceSpec]:
    """CPU and CUDA."""
    return [
        DeviceSpec(name="cpu", help="Streams are worker threads.", factory="mlsys_core.device:CpuDevice"),
        DeviceSpec(
            name="cuda", help="Streams are CUDA streams, through torch.", factory="mlsys_core.device:CudaDevice"
        ),
    ]


@hookimpl
def mlsys_register_memory_pools() -> Iterable[MemoryPoolSpec]:
    """The pool of fixed blocks."""
    return [MemoryPoolSpec(name="block", help="Blocks with reference counts.", factory="mlsys_core.memory:BlockPool")]


@hookimpl
def mlsys_register_policies() -> Iterable[PolicySpec]:
    """The request-level baselines."""
    policies = {
        "zero-batch": ("Whatever waits, as soon as a worker is idle.", "ZeroBatch"),
        "delay-batch": ("Wait for a window's end or a full batch.", "DelayBatch"),
        "bucketed": ("Buckets of like lengths, padded, in turn.", "Bucketed"),
        "static-batch": ("Full batches only.", "StaticBatch"),
    }
    return [
        PolicySpec(name=name, kind="batching", help=help_, factory=f"mlsys_core.serving.baselines:{cls}")
        for name, (help_, cls) in policies.items()
    ]


@hookimpl
def mlsys_register_exporters() -> Iterable[ExporterSpec]:
    """Chrome-trace JSON, which Perfetto opens."""
    return [
        ExporterSpec(
            name="chrome-trace",
            kind="timeline",
            help="Chrome-trace JSON for Perfetto.",
            factory="mlsys_core.profiling:write_trace",
        )
    ]
