"""Sources of models: the protocol by which a repository loads by name, directories on disk, a command's arguments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from mlsys_core.errors import InvalidInputError

from mlsys_serving.models.model import Model

Made = TypeVar("Made", bound=Model)


class ModelSource(Protocol):
    """A source from which a repository loads and unloads models by name; a plugin may bring one."""

    def names(self) -> Sequence[str]:
        """Return the names of the models that could be loaded now, sorted."""
        ...

    async def load(self, name: str) -> Sequence[Model]:
        """Load all versions of one model; slow work belongs into a thread.

        Raises:
            InvalidInputError: there is no such model, or what is there is no model; the message is shown to clients.
        """
        ...


class DirectorySource:
    """Models in directories: ``NAME/`` (version 1) or ``NAME/1/``, ``NAME/2/``, ... holding ``marker``.

    Args:
        roots: directories that are a model, or that hold directories that are. Looked at anew on each call.
        build: makes one version: ``build(directory, name, version)``. Runs in a thread; its ``InvalidInputError`` is
            the reason clients see.
        marker: the file by which a directory is known to hold a model, e.g. ``"manifest.json"``; or a function that
            says whether a directory does.

    Raises:
        InvalidInputError: a root is no directory.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     Path(root, "encoder", "2").mkdir(parents=True)
        ...     _ = Path(root, "encoder", "2", "manifest.json").write_text("{}")
        ...     DirectorySource([Path(root)], build=lambda *_: None, marker="manifest.json").names()
        ['encoder']
    """

    def __init__(
        self, roots: Sequence[Path], *, build: Callable[[Path, str, str], Model], marker: str | Callable[[Path], bool]
    ) -> None:
        for root in roots:
            if not root.is_dir():
                raise InvalidInputError(f"{root} is no directory: give one with a model in it, or one with such below")
        self._roots = [root.resolve() for root in roots]
        self._build = build
        self._holds_model = (lambda path: (path / marker).is_file()) if isinstance(marker, str) else marker
        known: dict[str, Path] = {}
        for directory in self._all():
            if known.setdefault(directory.name, directory) != directory:
                raise InvalidInputError(
                    f"{known[directory.name]} and {directory} are models of one name, {directory.name!r}: rename one"
                )

    def names(self) -> Sequence[str]:
        """Return the names of all model directories."""
        return sorted(self._directories())

    async def load(self, name: str) -> Sequence[Model]:
        """Return every version of ``name``, built in a thread."""
        directory = self._directories().get(name)
        if directory is None:
            raise InvalidInputError(f"no model {name!r} here; there are: {', '.join(self.names()) or 'none'}")
        return await asyncio.to_thread(self._build_all, name, directory)

    def directory(self, name: str) -> Path | None:
        """Return the directory of a model; None: there is none."""
        return self._directories().get(name)

    def _build_all(self, name: str, directory: Path) -> list[Model]:
        versions = self._versions(directory)
        return [self._build(versions[version], name, version) for version in sorted(versions, key=int)]

    def _directories(self) -> dict[str, Path]:
        """Return models by name; of two that have one name since the start, the one of the first root."""
        found: dict[str, Path] = {}
        for directory in self._all():
            found.setdefault(directory.name, directory)
        return found

    def _all(self) -> Iterator[Path]:
        for root in self._roots:
            candidates = [root] if self._versions(root) else sorted(path for path in root.iterdir() if path.is_dir())
            yield from (directory for directory in candidates if self._versions(directory))

    def _versions(self, directory: Path) -> dict[str, Path]:
        """Return directories by version; empty if ``directory`` is no model."""
        if self._holds_model(directory):
            return {"1": directory}
        return {
            path.name: path
            for path in directory.iterdir()
            if path.is_dir() and path.name.isdecimal() and path.name[0] != "0" and self._holds_model(path)
        }


class ArgumentSource(Generic[Made]):
    """Models that a command was given, by the names that they have on the wire; an unloaded one can be loaded again.

    Args:
        build: Loads the model of an argument.

    Attributes:
        latest: Latest model of each name; one that was unloaded stays until it is loaded again.
    """

    def __init__(self, build: Callable[[str], Made]) -> None:
        self._build = build
        self._arguments: dict[str, str] = {}  # by name
        self.latest: dict[str, Made] = {}

    def add(self, argument: str) -> Made:
        """Build the model of ``argument``; not within an event loop.

        Raises:
            InvalidInputError: as its build; or another argument's model has its name.
        """
        model = self._build(argument)
        name = model.spec.name
        if name in self._arguments:
            asyncio.run(model.close())
            raise InvalidInputError(f"{argument}: there is a model {name!r} already; give each model once")
        self._arguments[name], self.latest[name] = argument, model
        return model

    def names(self) -> Sequence[str]:
        """Return the names of all models that were added, sorted."""
        return sorted(self._arguments)

    async def load(self, name: str) -> Sequence[Made]:
        """Build a model again, in a thread."""
        if name not in self._arguments:
            raise InvalidInputError(f"no model {name!r} here; there are: {', '.join(self.names()) or 'none'}")
        self.latest[name] = await asyncio.to_thread(self._build, self._arguments[name])
        return [self.latest[name]]
