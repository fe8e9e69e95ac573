"""Completion of arguments in a shell: names of models and data, and files.

A file counts as one of a model's by its ending; a folder may be one, or lead to one.
"""

from __future__ import annotations

from pathlib import Path

from mlsys_core.models import ENTRIES

_ENDINGS = (".gguf", ".pt2", ".onnx")


def models(incomplete: str) -> list[str]:
    """Return the names and paths of models that begin with ``incomplete``."""
    return [*_names(incomplete, "model"), *_paths(incomplete)]


def names(incomplete: str) -> list[str]:
    """Return the names of models and data that begin with ``incomplete``."""
    return [*_names(incomplete, "model"), *_names(incomplete, "data")]


def _names(incomplete: str, kind: str) -> list[str]:
    return [entry.name for entry in ENTRIES if entry.kind == kind and entry.name.startswith(incomplete)]


def _paths(incomplete: str) -> list[str]:
    folder, _, begin = incomplete.rpartition("/")
    try:
        found = sorted(Path(f"{folder}/" if incomplete.startswith("/") else folder or ".").expanduser().iterdir())
    except OSError:
        return []
    prefix = incomplete[: len(incomplete) - len(begin)]
    fitting = [path for path in found if path.name.startswith(begin) and (begin or not path.name.startswith("."))]
    folders = [f"{prefix}{path.name}/" for path in fitting if path.is_dir()]
    return folders + [f"{prefix}{path.name}" for path in fitting if path.suffix in _ENDINGS and path.is_file()]
