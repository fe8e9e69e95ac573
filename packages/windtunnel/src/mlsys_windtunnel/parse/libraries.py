"""Libraries whose estimators take tables in ways of their own, which scikit-learn's tags do not tell.

LightGBM's and XGBoost's are in ``boosters.py``; a plugin names that of its converters in their ``ConverterSpec``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mlsys_core.errors import MissingDependencyError

PLUGINS = {"catboost": "mlsys-windtunnel-catboost"}  # distributions that convert a library, by its package


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """Traits of a library's estimators; the functions take a fitted estimator."""

    package: str  # top-level package of its classes, "catboost"
    takes_nan: bool = False  # missing values, whatever the tags say
    takes_inf: bool = False  # infinity too, where missing values are taken
    takes_tuples: bool = True  # rows in a tuple or another iterable that is no list, and scipy's sparse arrays
    labels_are_names: bool = False  # labels of a frame that are no texts count as names, spelt as texts
    unstored_is_missing: bool = False  # cells that a sparse table does not store are missing, not 0
    reads_by_name: bool = False  # a frame's columns are looked up by name, in any order and among others
    column_names: Callable[[Any], Sequence[str] | None] | None = None  # names seen in fit; None: feature_names_in_
    category_columns: Callable[[Any], tuple[int, ...] | None] | None = None  # indices that may be of pandas' category


@cache
def plugin_libraries() -> dict[str, Library]:
    """Return the libraries that installed plugins convert, by package."""
    from mlsys_core.plugins import installed_plugins
    from mlsys_core.plugins.specs import ConverterSpec

    registry = installed_plugins().registry
    named = {spec.library: spec for spec in registry.all(ConverterSpec) if spec.library is not None}
    found: list[Library] = [registry.part(named[each], each) for each in sorted(named)]
    return {library.package: library for library in found}


def check_installed(source: str) -> None:
    """Look for the plugin of an estimator's class, where there is one.

    Raises:
        MissingDependencyError: its library is converted by a distribution that is not installed.
    """
    package = source.partition(".")[0]
    if package in PLUGINS and package not in plugin_libraries():
        raise MissingDependencyError(
            f"{source} is converted by a plugin that is not installed: pip install {PLUGINS[package]}"
        )
