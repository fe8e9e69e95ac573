"""Adapters that an engine has now: their names for clients, and the keys under which requests give them."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakSet

from mlsys_orca.engine.streams import TokenStream


class AdapterTable:
    """Names and keys of adapters, and the requests under each. Pure but for the streams that it watches.

    An adapter whose name is taken away keeps its key until the last request under it has ended.

    Args:
        keys: Key by name, of those that are there from the start.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._keys = dict(keys)
        self._installed = set(keys.values())
        self._users: dict[str, WeakSet[TokenStream]] = {}

    @property
    def names(self) -> frozenset[str]:
        """Names that clients may give."""
        return frozenset(self._keys)

    @property
    def installed(self) -> frozenset[str]:
        """Keys that the engine knows, some of them for requests that still run."""
        return frozenset(self._installed)

    def key_of(self, name: str) -> str | None:
        """Return the key that requests for ``name`` give; None: there is no adapter of that name."""
        return self._keys.get(name)

    def is_named(self, key: str) -> bool:
        """Return whether clients can ask for it."""
        return key in self._keys.values()

    def add(self, name: str, key: str) -> str | None:
        """Give ``name`` to the adapter under ``key``; return the key that had it before."""
        before = self._keys.get(name)
        self._keys[name] = key
        self._installed.add(key)
        return before

    def remove(self, name: str) -> str:
        """Take the name away; return the key that had it."""
        return self._keys.pop(name)

    def forget(self, key: str) -> None:
        """Note that the engine knows the key no more."""
        self._installed.discard(key)
        self._users.pop(key, None)

    def use(self, key: str, stream: TokenStream) -> None:
        """Note a request under ``key``."""
        self._users.setdefault(key, WeakSet()).add(stream)

    def is_used(self, key: str) -> bool:
        """Return whether a request under ``key`` still runs."""
        return any(not stream.is_closed for stream in self._users.get(key, ()))
