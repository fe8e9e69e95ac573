"""What plugins register: small frozen records. Heavy things stay lazy ``"package.module:attribute"`` strings.

Every spec has a ``name``, unique within its kind. ``help`` is one line for listings. ``factory`` (or ``app``, ``run``)
is resolved by :func:`mlsys_core.lazy.resolve` only when the thing is asked for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What all specs share."""

    name: str  # unique within the kind; lower case, words joined by '-'
    help: str  # one line, shown in listings and --help


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec(Spec):
    """A command below ``mlsys``."""

    app: str  # -> typer.Typer; give it a callback if it is to stay a group when it has a single command
    hidden: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec(Spec):
    """A kind of device."""

    factory: str  # -> Callable[[int], mlsys_core.device.Device]; the argument is the device's index


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoolSpec(Spec):
    """An allocator of fixed blocks."""

    factory: str  # -> Callable[[int], pool]; the argument is the number of blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerSpec(Spec):
    """A compiler of modules, chosen by name (Orca's decode step, BatchMaker's cells, DVABatch's stages)."""

    factory: str  # -> Callable[[nn.Module, example_inputs, **options], Callable]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec(Spec):
    """Something that serves models."""

    factory: str  # -> Callable[..., engine]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec(Spec):
    """A scheduling or batching policy of an engine."""

    kind: Literal["scheduling", "batching"]
    factory: str  # -> Callable[..., mlsys_core.serving.Scheduler]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoaderSpec(Spec):
    """A loader of model files."""

    suffixes: tuple[str, ...]  # file name endings it takes, e.g. (".gguf",)
    factory: str  # -> Callable[[Path], model]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConverterSpec(Spec):
    """A WindTunnel converter: one fitted estimator class to one operator."""

    source: str  # the estimator class, "package.module:Class"
    factory: str  # -> Callable[[estimator], operator]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterSpec(Spec):
    """A writer of recordings."""

    kind: Literal["timeline", "metrics"]
    factory: str  # -> Callable[[recording, Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkSpec(Spec):
    """A benchmark suite below ``mlsys bench``."""

    run: str  # -> Callable[[mlsys_core.bench.BenchContext], mlsys_core.bench.BenchResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoStepSpec(Spec):
    """One step of ``mlsys demo``."""

    run: str  # -> Callable[[mlsys_core.demo.DemoContext], mlsys_core.report.Section]
    order: int = field(default=100)  # steps run in this order, then by name


def noun(kind: type[Spec], count: int = 1) -> str:
    """What a kind of spec is called in messages.

    Example:
        >>> noun(DemoStepSpec), noun(PolicySpec, 2)
        ('demo step', 'policies')
    """
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__.removesuffix("Spec")).lower()
    if count == 1:
        return words
    return f"{words[:-1]}ies" if words.endswith("y") else f"{words}s"
