"""Specs that plugins register: small frozen records. Heavy objects stay lazy ``"package.module:attribute"`` strings.

Every spec has a ``name``, unique within its kind. ``help`` is one line for listings. ``factory`` (or ``app``, ``run``)
is resolved by :func:`mlsys_core.lazy.resolve` only on demand.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Fields common to all specs."""

    name: str  # unique within the kind; lower case, words joined by '-'
    help: str  # one line, shown in listings and --help


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec(Spec):
    """A command below ``mlsys``; with the name "orca quantize", below ``mlsys orca``."""

    app: str  # -> typer.Typer; give it a callback if it is to stay a group when it has a single command
    hidden: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec(Spec):
    """A kind of device, for ``--device NAME`` and ``NAME:INDEX``."""

    factory: str  # -> Callable[[int], mlsys_core.device.Device]; the argument is the device's index


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoolSpec(Spec):
    """A pool that hands out parts of a memory by number, for ``--memory-pool NAME``."""

    kind: Literal["blocks", "runs"]  # blocks of one size (Orca's K/V cache), or rows in a row (BatchMaker's state)
    factory: str  # blocks: -> Callable[[int], mlsys_core.memory.Blocks]; the argument is the number of blocks
    # runs: -> Callable[[int, int], mlsys_core.memory.Runs]; the first number, and one above the last


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerSpec(Spec):
    """A compiler of modules, for ``--compiler NAME`` (Orca's layers, BatchMaker's cells, DVABatch's stages)."""

    factory: str  # -> Callable[[nn.Module, tuple of example tensors], Callable]; takes and gives what the module does


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec(Spec):
    """A native kernel, for ``mlsys build`` and the wheels."""

    factory: str  # -> mlsys_core.native.Kernel: its source, headers and flags


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec(Spec):
    """An engine that serves models until Ctrl-C, for ``mlsys serve NAME ...``."""

    app: str  # -> typer.Typer with one command, whose arguments and options are the engine's own


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerExtensionSpec(Spec):
    """An addition to servers: routes, work beside the engine, options, live figures."""

    factory: str  # -> Callable[[mlsys_serving.extensions.Service], mlsys_serving.extensions.Extension | None]
    systems: tuple[str, ...] = ("*",)  # servers that have it: "orca", "batchmaker", "dvabatch", "windtunnel"; "*": all
    options: str | None = None  # -> a frozen dataclass: its fields become options of these systems' serve commands
    is_front: bool = False  # clients reach the server's models by it; a server of models needs one


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec(Spec):
    """A scheduling, batching or placement policy of an engine."""

    kind: Literal["scheduling", "batching", "placement"]  # placement: where the parts of a divided model run
    factory: str  # -> Callable[..., mlsys_core.loop.Scheduler]; placement: an mlsys_orca NodePlacer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoaderSpec(Spec):
    """A loader of model files, for every command of one engine that takes a model."""

    engine: str  # engine that uses it: "orca", "batchmaker", "dvabatch"
    suffixes: tuple[str, ...]  # of a file, or of one within a folder: ".gguf" is an ending, "config.json" a whole name
    factory: str  # -> Callable[[Path, mlsys_core.plugins.loading.LoadContext], model]; the engine says of which class


@dataclass(frozen=True, slots=True, kw_only=True)
class ConverterSpec(Spec):
    """A WindTunnel converter: one fitted estimator class to one operator."""

    source: str  # the estimator class, "package.module:Class"
    factory: str  # -> Callable[[estimator], operator]
    library: str | None = None  # -> mlsys_windtunnel.parse.libraries.Library: the tables that its estimators take


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterSpec(Spec):
    """A writer of recordings, for ``mlsys trace export FILE --to NAME OUT``."""

    factory: str  # -> Callable[[mlsys_core.profiling.Recording, Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkSpec(Spec):
    """A benchmark suite below ``mlsys bench``."""

    run: str  # -> Callable[[mlsys_core.bench.BenchContext], mlsys_core.report.Section]
    devices: tuple[str, ...] = ("cpu",)  # kinds of device that it measures; others are refused. "*": any


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoStepSpec(Spec):
    """One step of ``mlsys demo``."""

    run: str  # -> Callable[[mlsys_core.demo.DemoContext], mlsys_core.report.Section]
    order: int = field(default=100)  # steps run in this order, then by name
    devices: tuple[str, ...] = ("cpu",)  # kinds of device that it computes on; on others it is skipped. "*": any


def noun(kind: type[Spec], count: int = 1) -> str:
    """Return the name of a kind of spec for messages.

    Example:
        >>> noun(DemoStepSpec), noun(PolicySpec, 2)
        ('demo step', 'policies')
    """
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__.removesuffix("Spec")).lower()
    if count == 1:
        return words
    return f"{words[:-1]}ies" if words.endswith("y") else f"{words}s"
