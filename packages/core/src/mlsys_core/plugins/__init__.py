"""Plugins: typed specs, hooks, loading in the safe order, and the registry of loaded plugins."""

from __future__ import annotations

from functools import lru_cache

from mlsys_core.config import settings
from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.loader import LoadedPlugins, PluginRow, load_plugins
from mlsys_core.plugins.registry import Registry

__all__ = ["LoadedPlugins", "PluginRow", "Registry", "hookimpl", "installed_plugins", "load_plugins"]


@lru_cache(maxsize=1)
def installed_plugins() -> LoadedPlugins:
    """Return the plugins of this process, loaded on the first call under the process's settings."""
    return load_plugins(settings())
