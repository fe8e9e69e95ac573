"""Registered specs by kind and name. Hot loops never see the registry: take a factory once, at start."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeVar

from mlsys_core.errors import InvalidInputError, MlsysError, PluginError
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
        """Resolve the lazy reference of the spec of ``kind`` called ``name``; see :meth:`get` for errors."""
        spec = self.get(kind, name)
        return resolve(getattr(spec, _lazy_field(spec)))


@contextmanager
def failing_as(spec: Spec, registry: Registry) -> Iterator[None]:
    """Turn exceptions of the code behind ``spec``, other than errors on purpose, into a :class:`PluginError`.

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
    except MlsysError:
        raise
    except Exception as error:  # a plugin's own mistake: the message names the plugin, MLSYS_DEBUG shows the rest
        owner = registry.owner(spec) or "an unknown distribution"
        what = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        raise PluginError(
            f"{noun(type(spec))} {spec.name!r} of {owner} failed ({what}); MLSYS_DEBUG=1 shows where"
        ) from error
