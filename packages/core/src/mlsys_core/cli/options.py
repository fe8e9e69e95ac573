"""Options that several commands share, and checks of options by each other.

``--device``, ``--memory-pool`` and ``--compiler`` select a plugin's registration: each is looked up before anything is
loaded, and an unknown name is refused with the list of names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mlsys_core.errors import InvalidInputError


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


GRAPH_HELP = "Write the graph: .graphml, .dot, or a picture (.svg, .png, .pdf)."


def check_graph_file(path: Path | None) -> Path | None:
    """Refuse a file that no graph can be written to, before any work is done."""
    from mlsys_core.graphs import check_format

    if path is not None:
        check_format(path)
    return path


GraphFile = Annotated[Path | None, typer.Option("--graph", metavar="FILE", callback=check_graph_file, help=GRAPH_HELP)]


# The one option by which a user lets a file run code.
_TRUST_HELP = "Let files run code while they load (pickles, code of other packages): only if you trust their maker."

TrustPickles = Annotated[bool, typer.Option("--trust-code", "--trust", help=f"{_TRUST_HELP} --trust is its old name.")]
TrustCode = Annotated[bool, typer.Option("--trust-code", help=_TRUST_HELP)]


def require_choice(option: str, value: str, *allowed: str) -> None:
    """Refuse a value that is not among those allowed.

    Raises:
        InvalidInputError: It is not.

    Example:
        >>> require_choice("--executor", "both", "chunk", "cell")
        Traceback (most recent call last):
            ...
        mlsys_core.errors.InvalidInputError: --executor 'both': give chunk or cell
    """
    if value not in allowed:
        raise InvalidInputError(f"{option} {value!r}: give {_listed(allowed)}")


def require_read(what: str, chosen: str, *readers: str, **given: bool) -> None:
    """Refuse options that the choice made does not read.

    Args:
        what: Noun of the choices, like ``--policy``.
        chosen: The one that was made.
        readers: Those that read the options.
        given: By option, with underscores: whether it has another value than its default.

    Raises:
        InvalidInputError: One is given, and nothing would read it.

    Example:
        >>> require_read("--policy", "auto", "delay", window_ms=True)
        Traceback (most recent call last):
            ...
        mlsys_core.errors.InvalidInputError: --window-ms is for --policy delay, not auto: leave it out
    """
    for name, is_given in given.items():
        if is_given and chosen not in readers:
            option = name.replace("_", "-")
            raise InvalidInputError(f"--{option} is for {what} {_listed(readers)}, not {chosen}: leave it out")


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:-1]) + f" or {names[-1]}" if len(names) > 1 else names[0]
