"""The core's own registrations, through the same hooks as any plugin."""

from __future__ import annotations

from collections.abc import Iterable

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import CommandSpec, DeviceSpec, ExporterSpec, MemoryPoolSpec, PolicySpec


@hookimpl
def mlsys_register_commands() -> Iterable[CommandSpec]:
    """Return the commands that belong to no subsystem."""
    commands = {
        "demo": "Run each subsystem on real input and write one HTML report.",
        "doctor": "Show what this machine and installation can do, and what is missing.",
        "models": "List, fetch and locate models and data that need no hub.",
        "plugins": "List installed plugins, explain one, or write a new one.",
        "bench": "Run a benchmark suite against its peers.",
        "cache": "Show or clear what is kept between runs.",
        "build": "Compile all native kernels ahead of their first use.",
        "trace": "Summarise or export a recorded timeline.",
    }
    return [CommandSpec(name=name, help=help_, app=f"mlsys_core.cli.{name}:app") for name, help_ in commands.items()]


@hookimpl
def mlsys_register_devices() -> Iterable[DeviceSpec]:
    """Return CPU and CUDA."""
    return [
        DeviceSpec(name="cpu", help="Streams are worker threads.", factory="mlsys_core.device:CpuDevice"),
        DeviceSpec(
            name="cuda", help="Streams are CUDA streams, through torch.", factory="mlsys_core.device:CudaDevice"
        ),
    ]


@hookimpl
def mlsys_register_memory_pools() -> Iterable[MemoryPoolSpec]:
    """Return the core's pools: single blocks with reference counts, and runs of adjacent rows."""
    return [
        MemoryPoolSpec(
            name="block",
            kind="blocks",
            help="Blocks with reference counts; the last released is the first reused.",
            factory="mlsys_core.memory:BlockPool",
        ),
        MemoryPoolSpec(
            name="run",
            kind="runs",
            help="Runs of rows, each a power of two long, reused by size.",
            factory="mlsys_core.memory:RunPool",
        ),
    ]


@hookimpl
def mlsys_register_policies() -> Iterable[PolicySpec]:
    """Return the request-level baselines."""
    policies = {
        "zero-batch": ("Whatever waits, as soon as a worker is idle.", "ZeroBatch"),
        "delay-batch": ("Wait for a window's end or a full batch.", "DelayBatch"),
        "static-batch": ("Full batches only.", "StaticBatch"),
    }
    return [
        PolicySpec(name=name, kind="batching", help=help_, factory=f"mlsys_core.loop.baselines:{cls}")
        for name, (help_, cls) in policies.items()
    ]


@hookimpl
def mlsys_register_exporters() -> Iterable[ExporterSpec]:
    """Return the exporter of Chrome-trace JSON, which Perfetto opens."""
    return [
        ExporterSpec(
            name="chrome-trace",
            help="Chrome-trace JSON for Perfetto; gzipped if OUT ends in .gz.",
            factory="mlsys_core.profiling:write_trace",
        ),
    ]
