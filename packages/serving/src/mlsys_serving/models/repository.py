"""Models of a server: ready ones, and the reasons why others are not; loads, replaces and unloads them while it serves.

All of it belongs to the event loop's thread; sources do their slow work elsewhere. A request holds its version while
it runs (:meth:`.version.Version.hold`); a version is closed once it has left the repository and nothing holds it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from mlsys_core.errors import InvalidInputError, MlsysError

from mlsys_serving.models.errors import ModelLoadError, ModelNotReadyError, UnknownModelError
from mlsys_serving.models.model import Model
from mlsys_serving.models.source import ModelSource
from mlsys_serving.models.spec import NO_SETTINGS, ModelSettings
from mlsys_serving.models.version import Version


class ModelState(Enum):
    """The state of one version, in the protocol's words."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One line of the repository's index."""

    name: str
    version: str = ""  # empty if nothing of the model has been loaded yet
    state: ModelState | None = None  # None: it could be loaded, nobody has asked
    reason: str = ""  # why it is not ready


class Composed(Protocol):
    """A model made of others, which are in the repository: it asks them."""

    @property
    def name(self) -> str:
        """Name of the whole."""
        ...

    def model(self, repository: ModelRepository) -> Model:
        """Return the model.

        Raises:
            InvalidInputError: The others do not fit together, or one is missing.
        """
        ...


class ModelRepository:
    """Models by name and version.

    Args:
        models: ready at once; the repository owns and closes them.
        source: where :meth:`load` finds models; None: nothing can be loaded.

    Raises:
        InvalidInputError: a version of a model is given twice.

    Example:
        >>> repository = ModelRepository()
        >>> repository.find("encoder")
        Traceback (most recent call last):
        mlsys_serving.models.errors.UnknownModelError: there is no model 'encoder' here
    """

    def __init__(
        self,
        models: Sequence[Model] = (),
        *,
        source: ModelSource | None = None,
    ) -> None:
        self._source = source
        self._settings_of: Callable[[str], ModelSettings | None] = lambda _: None
        self._composed: dict[str, Composed] = {}
        self._ready: dict[str, dict[str, Version]] = {}  # name -> version -> model, versions ascending
        self._others: dict[tuple[str, str], IndexEntry] = {}  # versions that are not ready, by name and version
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(
            asyncio.Lock
        )  # one load or unload of a name at a time
        self._retiring: set[asyncio.Task[None]] = set()
        by_name: defaultdict[str, list[Model]] = defaultdict(list)
        for model in models:
            by_name[model.spec.name].append(model)
        for name, versions in by_name.items():
            self._ready[name] = _by_version(name, versions, NO_SETTINGS)

    def configure(
        self, settings_of: Callable[[str], ModelSettings | None] | None = None, composed: Sequence[Composed] = ()
    ) -> None:
        """Set what an operator says of the models, before any is served.

        Args:
            settings_of: Returns the settings of a model by name, or None; asked at each load. None: as before.
            composed: Models made of these, besides those before; one may use those before it.

        Raises:
            InvalidInputError: Settings that do not fit a model.
        """
        self._composed |= {each.name: each for each in composed}
        if settings_of is None:
            return
        self._settings_of = settings_of
        for name, versions in self._ready.items():
            settings = settings_of(name)
            if settings is not None:
                self._ready[name] = _by_version(name, [version.model for version in versions.values()], settings)

    @property
    def source(self) -> ModelSource | None:
        """Where models are loaded from; None: they are fixed."""
        return self._source

    def names(self) -> list[str]:
        """Return the names of all models, ready or loadable."""
        return [*self._ready, *(name for name in self._names() if name not in self._ready)]

    def find(self, name: str, version: str = "") -> Version:
        """Return a version that is ready; the greatest one if ``version`` is empty.

        Raises:
            UnknownModelError: there is none of that name, or not that version, or it was unloaded or failed to load.
            ModelNotReadyError: it is loading or unloading.
        """
        versions = self._ready.get(name)
        if versions:
            if not version:
                return next(reversed(versions.values()))
            if version in versions:
                return versions[version]
        raise self._missing(name, version)

    def versions(self, name: str = "", version: str = "") -> list[Version]:
        """Return the ready versions of one model, or of all.

        Raises:
            UnknownModelError, ModelNotReadyError: as :meth:`find`, if a name is given.
        """
        if not name:
            return [found for versions in self._ready.values() for found in versions.values()]
        found = self.find(name, version)
        return [found] if version else list(self._ready[name].values())

    def index(self, *, ready_only: bool = False) -> list[IndexEntry]:
        """Return all known models by name and version: ready ones, others with the reason, and loadable ones."""
        entries = [
            IndexEntry(name, version, ModelState.READY)
            for name, versions in self._ready.items()
            for version in versions
        ]
        if not ready_only:
            entries += self._others.values()
            known = {entry.name for entry in entries}
            entries += [IndexEntry(name) for name in self._names() if name not in known]
        return sorted(entries, key=lambda entry: (entry.name, len(entry.version), entry.version))

    async def load(self, name: str, settings: ModelSettings | None = None) -> None:
        """Load the versions of ``name``, or load them anew; the old ones serve until the new ones are ready.

        Args:
            name: Of the model.
            settings: Its configuration for this once; None: as its files have it.

        Raises:
            ModelLoadError: the source has no such model, or it failed; versions ready before stay ready.
        """
        if self._source is None and name not in self._composed:
            raise ModelLoadError(f"model {name!r} cannot be loaded: this server's models are fixed")
        if name not in self._ready and name not in (names := self._names()):  # nothing is kept of such names
            raise ModelLoadError(f"there is no model {name[:200]!r} to load; there are: {', '.join(names) or 'none'}")
        async with self._locks[name]:
            self._forget(name)
            if name not in self._ready:
                self._note(IndexEntry(name, "", ModelState.LOADING))
            try:
                loaded = await self._loaded(name, settings)
            except MlsysError as error:
                self._forget(name)
                if name not in self._ready:
                    self._note(IndexEntry(name, "", ModelState.UNAVAILABLE, str(error)))
                raise ModelLoadError(f"model {name!r} could not be loaded: {error}") from error
            except BaseException:
                self._forget(name)
                if name not in self._ready:
                    self._note(IndexEntry(name, "", ModelState.UNAVAILABLE, "internal error, see the server's log"))
                raise
            self._forget(name)
            for old in self._ready.pop(name, {}).values():
                self._in_background(old.retire())
            self._ready[name] = loaded

    def _names(self) -> list[str]:
        """Return the names of all models that can be loaded, those last that are made of others."""
        return [*(self._source.names() if self._source is not None else ()), *self._composed]

    async def _loaded(self, name: str, settings: ModelSettings | None) -> dict[str, Version]:
        """Return a model's versions."""
        settings = settings or self._settings_of(name) or NO_SETTINGS
        models: Sequence[Model]
        if name in self._composed:
            models = [self._composed[name].model(self)]
        else:
            assert self._source is not None
            models = await self._source.load(name)
        try:
            return _by_version(name, models, settings)
        except BaseException:
            for model in models:
                await model.close()
            raise

    async def load_all(self) -> None:
        """Load every model of the source that is not ready.

        Raises:
            ModelLoadError: the first that failed.
        """
        names = self._names()
        twice = [name for name in self._composed if names.count(name) > 1 or name in self._ready]
        if twice:
            raise ModelLoadError(f"there is a model {twice[0]!r} already: give a cascade another name")
        for name in names:
            if name not in self._ready:
                await self.load(name)

    async def unload(self, name: str) -> None:
        """Take ``name`` out of service at once; it is closed when the requests that run on it have ended.

        A model that is not loaded stays so, as in Triton: programs unload at their end what they may have loaded.

        Raises:
            UnknownModelError: there is no such model.
        """
        if name not in self._ready and name not in self._locks and not self._is_known(name):
            raise self._missing(name, "")
        async with self._locks[name]:
            if name not in self._ready and not self._is_known(name):
                raise self._missing(name, "")
            for version in self._ready.pop(name, {}).values():
                self._note(IndexEntry(name, version.spec.version, ModelState.UNLOADING))
                self._in_background(self._unload(version))

    async def close(self) -> None:
        """Unload everything and wait until all models are closed."""
        for name in list(self._ready):
            await self.unload(name)
        while self._retiring:
            await asyncio.wait(set(self._retiring))

    async def _unload(self, version: Version) -> None:
        entry = IndexEntry(version.spec.name, version.spec.version, ModelState.UNLOADING)
        try:
            await version.retire()
        finally:
            if self._others.get((entry.name, entry.version)) == entry:  # not loaded again meanwhile
                self._note(IndexEntry(entry.name, entry.version, ModelState.UNAVAILABLE, "unloaded"))

    def _is_known(self, name: str) -> bool:
        """Return True if the model can be loaded, or has been."""
        return any(entry.name == name for entry in self._others.values()) or name in self._names()

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    def _note(self, entry: IndexEntry) -> None:
        self._others[entry.name, entry.version] = entry

    def _forget(self, name: str) -> None:
        for key in [key for key in self._others if key[0] == name]:
            del self._others[key]

    def _missing(self, name: str, version: str) -> UnknownModelError | ModelNotReadyError:
        what = f"version {version!r} of model {name!r}" if version else f"model {name!r}"
        for entry in self._others.values():
            if entry.name != name or (version and entry.version not in (version, "")):
                continue
            if entry.state in (ModelState.LOADING, ModelState.UNLOADING):
                return ModelNotReadyError(f"{what} is not ready: it is {entry.state.value.lower()}")
            return UnknownModelError(f"{what} is not ready: {entry.reason}")
        if name in self._ready:
            return UnknownModelError(f"there is no {what} here; there are: {', '.join(self._ready[name])}")
        if name in self._names():
            return UnknownModelError(f"{what} is not ready: it has not been loaded")
        return UnknownModelError(f"there is no {what} here")


def _by_version(name: str, models: Sequence[Model], settings: ModelSettings) -> dict[str, Version]:
    """Return the models of one name, in ascending order of their versions."""
    if not models:
        raise InvalidInputError("its source holds no version of it")
    versions = sorted((Version(model, settings) for model in models), key=lambda version: int(version.spec.version))
    for version in versions:
        if version.spec.name != name:
            raise InvalidInputError(f"its source gave a model called {version.spec.name!r}")
    by_version = {version.spec.version: version for version in versions}
    if len(by_version) != len(versions):
        raise InvalidInputError(f"model {name!r} has two models of one version")
    return by_version
