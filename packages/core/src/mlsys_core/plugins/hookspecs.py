"""The hooks a plugin may implement. Each returns the specs it adds; a plugin implements only those it needs.

A plugin is a module named by an entry point of the group ``mlsys.plugins``, with functions marked :data:`hookimpl`.
The bodies here only document and are never called.
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from mlsys_core.plugins import specs

PROJECT = "mlsys"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def mlsys_register_commands() -> Iterable[specs.CommandSpec]:
    """Return commands below ``mlsys``."""
    raise NotImplementedError


@hookspec
def mlsys_register_devices() -> Iterable[specs.DeviceSpec]:
    """Return kinds of device, for ``--device``."""
    raise NotImplementedError


@hookspec
def mlsys_register_memory_pools() -> Iterable[specs.MemoryPoolSpec]:
    """Return pools of blocks or of runs of rows, for ``--memory-pool``."""
    raise NotImplementedError


@hookspec
def mlsys_register_compilers() -> Iterable[specs.CompilerSpec]:
    """Return compilers of modules, for ``--compiler``."""
    raise NotImplementedError


@hookspec
def mlsys_register_kernels() -> Iterable[specs.KernelSpec]:
    """Return native kernels, which ``mlsys build`` compiles ahead."""
    raise NotImplementedError


@hookspec
def mlsys_register_engines() -> Iterable[specs.EngineSpec]:
    """Return engines, for ``mlsys serve``."""
    raise NotImplementedError


@hookspec
def mlsys_register_policies() -> Iterable[specs.PolicySpec]:
    """Return scheduling and batching policies."""
    raise NotImplementedError


@hookspec
def mlsys_register_model_loaders() -> Iterable[specs.ModelLoaderSpec]:
    """Return loaders of model files, by the endings of names."""
    raise NotImplementedError


@hookspec
def mlsys_register_converters() -> Iterable[specs.ConverterSpec]:
    """Return WindTunnel converters of fitted estimators."""
    raise NotImplementedError


@hookspec
def mlsys_register_exporters() -> Iterable[specs.ExporterSpec]:
    """Return writers of recordings, for ``mlsys trace export``."""
    raise NotImplementedError


@hookspec
def mlsys_register_benchmarks() -> Iterable[specs.BenchmarkSpec]:
    """Return suites of ``mlsys bench``."""
    raise NotImplementedError


@hookspec
def mlsys_register_demo_steps() -> Iterable[specs.DemoStepSpec]:
    """Return steps of ``mlsys demo``."""
    raise NotImplementedError


@hookspec
def mlsys_register_server_extensions() -> Iterable[specs.ServerExtensionSpec]:
    """Return additions to servers: routes, options, live figures."""
    raise NotImplementedError
