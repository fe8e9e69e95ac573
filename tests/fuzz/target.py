"""A parser under test: where its inputs come from, and how one is given to it."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO

# One file's bytes, or the files of a folder or archive by name.
Input = bytes | dict[str, bytes]


@dataclass(frozen=True)
class Case:
    """A target made ready in a worker.

    Attributes:
        seeds: Real inputs, made by the project's own writers.
        parse: Take one; a refusal is an ``MlsysError``, and anything else that it raises is a crash.
        words: Texts that mean something to this parser, for mutators to put in.
    """

    seeds: list[Input]
    parse: Callable[[Input], None]
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """A parser by name.

    Attributes:
        prepare: Make seeds and files in an empty folder of the worker.
        share: Part of all runs, relative to the other targets: parsers that take long get fewer.
        limit_nbytes: Address space that a worker may take beyond what it has when it is ready.
    """

    name: str
    prepare: Callable[[Path], Case]
    share: int = 1
    limit_nbytes: int = 1 << 30


MODULES = ("core", "gguf", "models", "serving", "windtunnel")


def all_targets(*names: str) -> dict[str, Target]:
    """Return every target by name, or those of some modules."""
    modules = [import_module(f"tests.fuzz.targets.{name}") for name in names or MODULES]
    return {target.name: target for module in modules for target in module.TARGETS}


def write_folder(files: Input, folder: Path) -> Path:
    """Write the files of an input into an empty folder and return it."""
    assert isinstance(files, dict)
    for old in folder.glob("**/*"):
        if old.is_file():
            old.unlink()
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def write_archive(files: Input, path: Path) -> Path:
    """Write the members of an input into a zip archive and return its path."""
    assert isinstance(files, dict)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def read_archive(archive: Path | IO[bytes]) -> dict[str, bytes]:
    """Return the members of a zip archive by name."""
    with zipfile.ZipFile(archive) as opened:
        return {info.filename: opened.read(info) for info in opened.infolist()}


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder by their path in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
