"""Registered specs by kind and name. Hot loops never see the registry: take a factory once, at start."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

from mlsys_core.errors import InvalidInputError, MissingDependencyError, MlsysError, PluginError
from mlsys_core.lazy import resolve
from mlsys_core.plugins.specs import Spec, noun

S = TypeVar("S", bound=Spec)


def _lazy_field(spec: Spec) -> str:
    """Return the name of the spec's field that holds its lazy reference."""
    return next(f.name for f in fields(spec) if f.name in {"app", "factory", "run"})


class Registry:
    """Specs by kind and name, each with the distribution that owns it."""

    def __init__(self) -> None:
        self._entries: dict[type[Spec], dict[str, tuple[Spec, str]]] = {}
        self.unavailable: dict[str, str] = {}  # plugin name -> why it is not loaded; quoted when a look-up fails

    def owner(self, spec: Spec) -> str | None:
        """Return the distribution that registered this name for this kind, or None."""
        entry = self._entries.get(type(spec), {}).get(spec.name)
        return entry[1] if entry else None

    def add(self, spec: Spec, distribution: str) -> None:
        """Register ``spec``.

        Raises:
            PluginError: the name is taken; the message names both distributions.
        """
        owner = self.owner(spec)
        if owner is not None:
            kind = noun(type(spec))
            raise PluginError(
                f"{kind} {spec.name!r} is registered by both {owner} and {distribution}: "
                f"uninstall one of them, or block a plugin with MLSYS_PLUGINS_BLOCK=NAME"
            )
        self._entries.setdefault(type(spec), {})[spec.name] = (spec, distribution)

    def all(self, kind: type[S]) -> list[S]:
        """Return all specs of ``kind``, in the order they were registered."""
        return [spec for spec, _ in self._entries.get(kind, {}).values() if isinstance(spec, kind)]

    def owned_by(self, distribution: str) -> list[Spec]:
        """Return all specs that ``distribution`` registered."""
        return [spec for kind in self._entries.values() for spec, owner in kind.values() if owner == distribution]

    def get(self, kind: type[S], name: str) -> S:
        """Return the spec of ``kind`` called ``name``.

        Raises:
            PluginError: there is none; the message lists the names and the plugins that could not be loaded.
        """
        entries = self._entries.get(kind, {})
        if name in entries:
            spec = entries[name][0]
            assert isinstance(spec, kind)
            return spec
        raise PluginError(self.why_unknown(noun(kind), name, entries))

    def why_unknown(self, what: str, name: str, known: Collection[str]) -> str:
        """Return the message that no ``what`` is called ``name``, with the known names and the plugins not loaded."""
        message = f"no {what} is called {name!r}"
        close = difflib.get_close_matches(name, known, n=1)
        if close:
            message += f"; did you mean {close[0]!r}?"
        message += f" (there are: {', '.join(sorted(known)) or 'none'})"
        if self.unavailable:
            reasons = "; ".join(f"{plugin}: {why}" for plugin, why in sorted(self.unavailable.items()))
            message += f". Plugins not loaded: {reasons}"
        return message

    def chosen(self, kind: type[S], name: str) -> S:
        """Return the spec of ``kind`` that a user named.

        Raises:
            InvalidInputError: there is none; the message is that of :meth:`get`.
        """
        try:
            return self.get(kind, name)
        except PluginError as error:
            raise InvalidInputError(str(error)) from error

    def load(self, kind: type[S], name: str) -> Any:
        """Return :meth:`part` of the spec of ``kind`` called ``name``; see :meth:`get` for errors."""
        return self.part(self.get(kind, name))

    def part(self, spec: Spec, reference: str | None = None, *, passing: tuple[type[BaseException], ...] = ()) -> Any:
        """Return the object behind ``spec``; calls of a function or class fail as :func:`failing_as` says.

        Args:
            spec: One of the registered specs.
            reference: Another lazy reference of it than its main one.
            passing: As in :func:`failing_as`.

        Raises:
            PluginError: it cannot be imported; the message names the spec and its distribution.
            MissingDependencyError: likewise, since something is not installed.
        """
        field = _lazy_field(spec)
        try:
            with failing_as(spec, self):
                found = resolve(reference or getattr(spec, field))
        except (InvalidInputError, MissingDependencyError) as error:
            kind = MissingDependencyError if isinstance(error, MissingDependencyError) else PluginError
            raise kind(f"{noun(type(spec))} {spec.name!r} of {self.owner(spec)} cannot be loaded: {error}") from error
        if field == "app" or not callable(found):
            return found

        @wraps(found)
        def call(*args: Any, **keywords: Any) -> Any:
            with failing_as(spec, self, passing=passing):
                return found(*args, **keywords)

        return call

    def blamed(self, error: BaseException) -> Spec | None:
        """Return the part, of those that are no commands, in whose code ``error`` was raised; None: of none.

        A part's objects are used long after they were made, in hot loops: so they are not wrapped, and found here.
        """
        by_module: dict[str, dict[str, Spec]] = {}
        for spec in (spec for kind in self._entries.values() for spec, _ in kind.values()):
            module, _, attribute = str(getattr(spec, _lazy_field(spec))).partition(":")
            if _lazy_field(spec) != "app":
                by_module.setdefault(module, {})[attribute.partition(".")[0]] = spec
        found, trace = None, error.__traceback__
        while trace is not None:
            frame, trace = trace.tb_frame, trace.tb_next
            if parts := by_module.get(frame.f_globals.get("__name__", "")):
                only = next(iter(parts.values())) if len(parts) == 1 else None
                found = parts.get(frame.f_code.co_qualname.partition(".")[0], only) or found
        return found


def one_line(error: BaseException) -> str:
    """Return the kind and the text of an error on one line.

    Example:
        >>> one_line(KeyError("a")), one_line(ValueError())
        ("KeyError: 'a'", 'ValueError')
    """
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a plugin's own class of errors, which cannot tell its text
        text = ""
    return " ".join(f"{type(error).__name__}: {text}".split()).removesuffix(":")


@contextmanager
def failing_as(spec: Spec, registry: Registry, *, passing: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Turn exceptions of the code behind ``spec``, other than errors on purpose, into a :class:`PluginError`.

    ``passing``: further classes that are left as they are. An exception out of another registered part names that one.

    Example:
        >>> from mlsys_core.plugins.specs import ExporterSpec
        >>> with failing_as(ExporterSpec(name="csv", help="x", factory="a:b"), Registry()):
        ...     {}["missing"]
        Traceback (most recent call last):
        ...
        mlsys_core.errors.PluginError: exporter 'csv' of an unknown distribution failed (KeyError: 'missing'); ...
    """
    try:
        yield
    except (Exception, SystemExit) as error:  # a plugin's own mistake: named here, MLSYS_DEBUG shows the rest
        blamed = registry.blamed(error)
        if isinstance(error, (MlsysError, *passing)) and not (blamed and isinstance(error, SystemExit)):
            raise
        spec = blamed or spec
        owner = registry.owner(spec) or "an unknown distribution"
        raise PluginError(
            f"{noun(type(spec))} {spec.name!r} of {owner} failed ({one_line(error)}); MLSYS_DEBUG=1 shows where"
        ) from error
