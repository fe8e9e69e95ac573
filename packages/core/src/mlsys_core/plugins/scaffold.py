"""Write a new plugin package from the templates in ``plugins/template``."""

from __future__ import annotations

import importlib.resources
import keyword
import re
from pathlib import Path

import mlsys_core
from mlsys_core.errors import InvalidInputError


def write_plugin(name: str, target: Path) -> list[Path]:
    """Write a plugin package called ``name`` into the new folder ``target``; return the files written.

    Raises:
        InvalidInputError: the name is not usable, or ``target`` exists and is not empty; nothing is written then.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise InvalidInputError(
            f"{name!r} is not a plugin name: use lower-case letters and digits, words joined by '-', e.g. my-plugin"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidInputError(f"{target} exists and is not empty: choose another folder with --directory")
    major, minor = mlsys_core.__version__.split(".")[:2]
    values = {
        "@NAME@": name,
        "@MODULE@": f"mlsys_{name.replace('-', '_')}",
        "@CORE@": f">={major}.{minor},<{major}.{int(minor) + 1}",
    }
    written = []
    root = importlib.resources.files("mlsys_core") / "plugins" / "template"
    for template, destination in _FILES.items():
        text = (root / template).read_text(encoding="utf-8")
        for key, value in values.items():
            text = text.replace(key, value)
            destination = destination.replace(key, value)
        path = target / destination
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


_FILES = {
    "pyproject.toml.tmpl": "pyproject.toml",
    "README.md.tmpl": "README.md",
    "init.py.tmpl": "src/@MODULE@/__init__.py",
    "plugin.py.tmpl": "src/@MODULE@/_plugin.py",
    "cli.py.tmpl": "src/@MODULE@/cli.py",
    "py.typed.tmpl": "src/@MODULE@/py.typed",
    "test_plugin.py.tmpl": "tests/test_plugin.py",
}
