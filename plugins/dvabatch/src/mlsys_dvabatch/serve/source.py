"""The models that ``mlsys dvabatch serve`` was given, so that one that was unloaded can be loaded again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path

from mlsys_core.errors import InvalidInputError
from mlsys_dvabatch.serve.models import ServedModel
from mlsys_serving.oip.models.source import stamp_of


class ServedSource:
    """A source of models, each known by the name that it has on the wire.

    Args:
        build: loads and profiles the model of an argument of the command, and starts its engine.

    Example:
        >>> ServedSource(lambda argument: None).names()
        []
    """

    def __init__(self, build: Callable[[str], ServedModel]) -> None:
        self._build = build
        self._arguments: dict[str, str] = {}  # name on the wire -> argument
        self._served: dict[str, ServedModel] = {}  # the latest of each name

    def add(self, argument: str) -> ServedModel:
        """Build the model of ``argument``.

        Raises:
            InvalidInputError: as its build; or another argument's model has its name.
        """
        model = self._build(argument)
        name = model.spec.name
        if name in self._arguments:
            model.engine.close()
            raise InvalidInputError(f"{argument}: there is a model {name!r} already; give each model once")
        self._arguments[name] = argument
        self._served[name] = model
        return model

    def __iter__(self) -> Iterator[ServedModel]:
        """Iterate over the models for metrics; one that was unloaded keeps its last counts until it is loaded again."""
        return iter(tuple(self._served.values()))

    def names(self) -> Sequence[str]:
        """Return the names of all models that were added, sorted."""
        return sorted(self._arguments)

    def stamp(self, name: str) -> Hashable:
        """Return sizes and times of the files of a model; those of a model that has no path are always the same."""
        path = Path(self._arguments[name])
        return stamp_of(path) if path.exists() else ()

    async def load(self, name: str) -> Sequence[ServedModel]:
        """Build a model again, in a thread."""
        if name not in self._arguments:
            raise InvalidInputError(f"no model {name!r} here; there are: {', '.join(self.names()) or 'none'}")
        model = await asyncio.to_thread(self._build, self._arguments[name])
        self._served[name] = model
        return [model]
