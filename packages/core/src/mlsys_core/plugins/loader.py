"""Finding, checking, importing and registering plugins; one bad plugin never takes down the rest.

Order per plugin: block list and filter, core-version check from distribution metadata *before* import, import,
register, ``check_pending()`` (a mistyped hook name), then each hook implementation is called on its own. A plugin's
registrations are kept whole or not at all.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import pluggy
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mlsys_core
from mlsys_core.config import Settings
from mlsys_core.errors import PluginError
from mlsys_core.plugins import hookspecs
from mlsys_core.plugins.registry import Registry, one_line
from mlsys_core.plugins.specs import Spec, noun

GROUP = "mlsys.plugins"
CORE = "mlsys-core"
SLOW_LOAD_S = 0.3  # a plugin that takes longer to import delays every command; its row says so

Status = Literal["loaded", "broken", "blocked", "filtered"]


@dataclass(frozen=True, slots=True)
class PluginRow:
    """One line of ``mlsys plugins list``."""

    name: str  # the entry point's name
    distribution: str
    version: str
    status: Status
    error: str | None = None  # one line, if broken
    hint: str | None = None  # next step for the user
    load_time_s: float = 0.0
    specs: tuple[Spec, ...] = ()  # its registrations
    cause: BaseException | None = None  # its exception, if broken


@dataclass(frozen=True, slots=True)
class LoadedPlugins:
    """All plugins found, and the registrations of the good ones."""

    rows: Sequence[PluginRow]
    registry: Registry

    @property
    def broken(self) -> list[PluginRow]:
        """Rows that need a warning."""
        return [row for row in self.rows if row.status == "broken"]


class _RefusedError(PluginError):
    """A reason to refuse a plugin, with the next step."""

    def __init__(self, error: str, hint: str) -> None:
        super().__init__(error)
        self.hint = hint


def load_plugins(
    settings: Settings, *, entry_points: Iterable[importlib.metadata.EntryPoint] | None = None
) -> LoadedPlugins:
    """Load all installed plugins that ``settings`` allows; core's own specs come first and cannot be filtered.

    Args:
        settings: filter, block list and strictness.
        entry_points: entry points to load instead of the installed ones, for tests.

    Raises:
        PluginError: a plugin that ``settings.plugins`` names is absent or broken (its cause is chained).
        BaseException: in strict mode, the exception of a broken plugin.
    """
    from mlsys_core.plugins import builtin as core_plugin

    registry = Registry()
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    specs = _register(manager, registry, core_plugin, "core", CORE)
    rows = [PluginRow("core", CORE, mlsys_core.__version__, "loaded", specs=specs)]

    found = importlib.metadata.entry_points(group=GROUP) if entry_points is None else entry_points
    for entry_point in sorted(found, key=lambda e: (not e.value.startswith("mlsys_"), e.name, e.value)):
        row = _load_one(entry_point, settings, manager, registry, rows)
        rows.append(row)
        if row.status != "loaded":
            registry.unavailable[row.name] = row.error or row.status
    if settings.plugins is not None:
        _check_asked_for(settings.plugins, rows)
    return LoadedPlugins(rows, registry)


def _load_one(
    entry_point: importlib.metadata.EntryPoint,
    settings: Settings,
    manager: pluggy.PluginManager,
    registry: Registry,
    earlier: Sequence[PluginRow],
) -> PluginRow:
    name = entry_point.name
    distribution = entry_point.dist.name if entry_point.dist else entry_point.value.partition(".")[0]
    version = entry_point.dist.version if entry_point.dist else "unknown"
    if name in settings.blocked_plugins:
        return PluginRow(name, distribution, version, "blocked", hint=f"MLSYS_PLUGINS_BLOCK names {name!r}")
    if settings.plugins is not None and name not in settings.plugins:
        return PluginRow(name, distribution, version, "filtered", hint=f"MLSYS_PLUGINS leaves out {name!r}")
    started = time.perf_counter()
    try:
        _check_name(name, distribution, earlier)
        _check_core_version(entry_point.dist, distribution)
        specs = _register(manager, registry, entry_point.load(), name, distribution)
    except (Exception, SystemExit) as error:
        if settings.plugins_strict:
            raise
        why = str(error) if isinstance(error, PluginError) else one_line(error)
        next_step = (
            error.hint if isinstance(error, _RefusedError) else f"see the whole cause: mlsys plugins info {name}"
        )
        return PluginRow(name, distribution, version, "broken", why, next_step, cause=error)
    load_time_s = time.perf_counter() - started
    hint = f"took {load_time_s:.1f} s to load, which delays every command: import heavy modules inside functions"
    is_slow = load_time_s > SLOW_LOAD_S
    return PluginRow(
        name, distribution, version, "loaded", hint=hint if is_slow else None, load_time_s=load_time_s, specs=specs
    )


def _check_name(name: str, distribution: str, earlier: Sequence[PluginRow]) -> None:
    for row in earlier:
        if row.name == name:
            raise _RefusedError(
                f"plugin name {name!r} is used by both {row.distribution} and {distribution}",
                f"uninstall one of them: pip uninstall {distribution}",
            )


def _check_core_version(dist: importlib.metadata.Distribution | None, distribution: str) -> None:
    """Refuse a plugin whose own metadata excludes the installed core, before any of its code runs."""
    for text in (dist.requires or []) if dist else []:
        requirement = Requirement(text)
        if canonicalize_name(requirement.name) != CORE or (requirement.marker and not requirement.marker.evaluate()):
            continue
        if not requirement.specifier.contains(mlsys_core.__version__, prereleases=True):
            raise _RefusedError(
                f"{distribution} needs {CORE}{requirement.specifier}, but {mlsys_core.__version__} is installed",
                f"pip install --upgrade {distribution}",
            )


def _register(
    manager: pluggy.PluginManager, registry: Registry, plugin: object, name: str, distribution: str
) -> tuple[Spec, ...]:
    """Register ``plugin`` and what its hooks return, whole or not at all."""
    manager.register(plugin, name)
    try:
        _check_hook_names(manager)
        specs = list(_collect(manager, plugin, distribution))
        seen: dict[tuple[type[Spec], str], Spec] = {}
        for spec in specs:
            owner = distribution if (type(spec), spec.name) in seen else registry.owner(spec)
            if owner:
                kind = noun(type(spec))
                raise _RefusedError(
                    f"{kind} {spec.name!r} is registered by both {owner} and {distribution}",
                    f"uninstall one of them, or set MLSYS_PLUGINS_BLOCK={name}",
                )
            seen[type(spec), spec.name] = spec
    except BaseException:
        manager.unregister(plugin)
        raise
    for spec in specs:
        registry.add(spec, distribution)
    return tuple(specs)


def _check_hook_names(manager: pluggy.PluginManager) -> None:
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        known = [name for name in vars(hookspecs) if name.startswith("mlsys_register_")]
        text = str(error)
        unknown = next((word.strip("'\"") for word in text.split() if "mlsys_" in word or "register" in word), text)
        close = difflib.get_close_matches(unknown, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"the hooks are: {', '.join(known)}"
        raise _RefusedError(f"implements an unknown hook {unknown!r}", hint) from error


def _collect(manager: pluggy.PluginManager, plugin: object, distribution: str) -> Iterable[Spec]:
    """Call each hook implementation of ``plugin`` by itself and check the type of its result."""
    for caller in manager.get_hookcallers(plugin) or []:
        for implementation in caller.get_hookimpls():
            if implementation.plugin is not plugin:
                continue
            returned = implementation.function()
            items = list(returned) if isinstance(returned, Iterable) else [returned]
            for item in items:
                if not isinstance(item, Spec):
                    raise _RefusedError(
                        f"{caller.name} returned {type(item).__name__}, not a spec",
                        f"return specs of mlsys_core.plugins.specs from {distribution}",
                    )
                yield item


def _check_asked_for(names: frozenset[str], rows: Sequence[PluginRow]) -> None:
    by_name = {row.name: row for row in rows}
    for name in sorted(names):
        row = by_name.get(name)
        if row is None:
            raise PluginError(
                f"MLSYS_PLUGINS names {name!r}, which is not installed (installed: {', '.join(sorted(by_name))})"
            )
        if row.status == "broken":
            raise PluginError(f"plugin {name!r} ({row.distribution}) is broken: {row.error}. {row.hint}") from row.cause
