"""Options that select a plugin's registration, the same in every command.

``--device``, ``--memory-pool``, ``--compiler``: each is looked up before anything is loaded; an unknown name is refused
with the list of names.
"""

from __future__ import annotations

from typing import Annotated, Literal

import typer


def _usable_device(name: str) -> str:
    from mlsys_core.device import device_kind, get_device

    if device_kind(name).name != "cpu":  # the CPU is always there
        get_device(name)
    return name


def _known_pool(kind: Literal["blocks", "runs"], name: str | None) -> str | None:
    from mlsys_core.memory import find_pool

    if name is not None:
        find_pool(name, kind)
    return name


def _known_blocks(name: str | None) -> str | None:
    return _known_pool("blocks", name)


def _known_runs(name: str | None) -> str | None:
    return _known_pool("runs", name)


def _known_compiler(name: str | None) -> str | None:
    from mlsys_core.plugins import installed_plugins
    from mlsys_core.plugins.specs import CompilerSpec

    if name is not None:
        installed_plugins().registry.chosen(CompilerSpec, name)
    return name


Device = Annotated[
    str,
    typer.Option(callback=_usable_device, help="Where to compute: cpu, cuda, cuda:1, or a kind that a plugin adds."),
]
BlockPoolName = Annotated[
    str | None,
    typer.Option("--memory-pool", callback=_known_blocks, help="The pool of K/V blocks: block, or one of a plugin."),
]
RunPoolName = Annotated[
    str | None,
    typer.Option("--memory-pool", callback=_known_runs, help="The pool of state rows: run, or one of a plugin."),
]
CompilerName = Annotated[
    str | None,
    typer.Option(
        "--compiler", callback=_known_compiler, help="Compile parts of the model: nimble, or a compiler of a plugin."
    ),
]
