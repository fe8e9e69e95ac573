"""The table of built-in converters, gathered from the files of this folder. The coverage page is made from it."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

import mlsys_windtunnel.convert
from mlsys_windtunnel.convert.registry import ConverterRegistry, Converters, Entry


def converters() -> list[Entry]:
    """Return the lines of the families' ``CONVERTERS``."""
    return _lines("CONVERTERS")


def combiners() -> list[Entry]:
    """Return lines for meta-estimators whose members are operators of their own (see ``parse/expand.py``).

    Each joins the members' answers.
    """
    return _lines("COMBINERS")


@cache
def _lines(name: str) -> list[Entry]:
    families = [each.name for each in pkgutil.iter_modules(mlsys_windtunnel.convert.__path__)]
    tables = [getattr(import_module(f"mlsys_windtunnel.convert.{family}"), name, Converters()) for family in families]
    return [entry for table in tables for entry in table.entries]


def default_registry() -> ConverterRegistry:
    """Return the built-in table with the converters of installed plugins; a built-in entry wins over a plugin's."""
    from mlsys_core.plugins import installed_plugins
    from mlsys_core.plugins.specs import ConverterSpec

    added = {
        spec.source.replace(":", "."): Entry(spec.source.replace(":", "."), spec.factory, note=spec.help)
        for spec in installed_plugins().registry.all(ConverterSpec)
    }
    return ConverterRegistry(
        added | {entry.source: entry for entry in converters()}, {entry.source: entry for entry in combiners()}
    )
