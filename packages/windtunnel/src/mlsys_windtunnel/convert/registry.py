"""Converters, and the look-up of the one for an estimator.

A converter is a function ``(fitted estimator) -> OperatorModule | Converted | Unsupported | None``; with the last two
the estimator has an option that the converter does not know, and the operator stays on the host. Built-in ones are in
the table; a plugin adds its own with ``mlsys_register_converters``. Look-up is by exact class, since a subclass may
compute something else.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

import mlsys_windtunnel.convert
from mlsys_windtunnel.host.lookup import Lookup
from mlsys_windtunnel.modules.base import OperatorModule
from mlsys_windtunnel.parse.source import Bounds


@dataclass(frozen=True, slots=True)
class Converted:
    """An operator in two parts."""

    module: OperatorModule  # from what ``lookup`` gives, or from the operator's inputs
    lookup: Lookup | None = None  # runs before any tensor exists, so all the operator reads must come from the host
    num_codes: int | None = None  # columns that ``lookup`` gives


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A converter's answer to an estimator that it cannot reproduce."""

    what: str  # "linear leaves": what it has that the converter does not know


Converter = Callable[[Any], OperatorModule | Converted | Unsupported | None]
Function = TypeVar("Function", bound=Converter)


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the table of converters."""

    source: str  # the estimator's class as users import it
    converter: Converter
    is_trainable: bool = True  # gradients reach its parameters or pass through it
    note: str = ""  # what is special, for the coverage page
    bounds: Bounds | None = None  # least and largest number that a fitted source takes; None: what its options tell


class Converters:
    """Table of one family: its file declares each converter's classes beside it.

    Example:
        >>> converters = Converters()
        >>> @converters.of("sklearn.linear_model", "Ridge", "Lasso")
        ... def linear(estimator): ...
        >>> [entry.source for entry in converters.entries]
        ['sklearn.linear_model.Ridge', 'sklearn.linear_model.Lasso']
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def of(
        self, package: str, *classes: str, is_trainable: bool = True, note: str = "", bounds: Bounds | None = None
    ) -> Callable[[Function], Function]:
        """Return a decorator that makes a function the converter of some classes; the rest as in :class:`Entry`."""

        def declare(converter: Function) -> Function:
            sources = [f"{package}.{name}" for name in classes]
            self.entries += [Entry(source, converter, is_trainable, note, bounds) for source in sources]
            return converter

        return declare


class ConverterRegistry:
    """Look-up of converters by the class of a fitted estimator.

    Args:
        entries: Built-in and plugins' lines, by ``source``.
        combiners: Lines for meta-estimators whose members are operators of their own, by ``source``.
    """

    def __init__(self, entries: Mapping[str, Entry], combiners: Mapping[str, Entry] | None = None) -> None:
        self._entries = entries
        self._combiners = combiners or {}

    def find(self, source: str | None) -> Converter | None:
        """Return the converter for a class name of the graph, or None: the operator stays a fallback."""
        entry = self._entries.get(source or "")
        return None if entry is None else entry.converter

    def find_combiner(self, source: str | None) -> Converter | None:
        """Return the converter that joins the answers of a meta-estimator's members, or None, as :meth:`find` does."""
        entry = self._combiners.get(source or "")
        return None if entry is None else entry.converter

    def bounds(self, source: str | None) -> Bounds | None:
        """Return what tells the numbers that a source takes; None where its converter says nothing of them."""
        entry = self._entries.get(source or "")
        return None if entry is None else entry.bounds

    def adding(self, entry: Entry) -> ConverterRegistry:
        """Return a registry with one more line."""
        return ConverterRegistry({**self._entries, entry.source: entry}, self._combiners)


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

    registry = installed_plugins().registry

    def imported_when_called(spec: ConverterSpec) -> Converter:
        return lambda estimator: registry.part(spec)(estimator)

    added = {
        spec.source.replace(":", "."): Entry(spec.source.replace(":", "."), imported_when_called(spec), note=spec.help)
        for spec in registry.all(ConverterSpec)
    }
    return ConverterRegistry(
        added | {entry.source: entry for entry in converters()}, {entry.source: entry for entry in combiners()}
    )
