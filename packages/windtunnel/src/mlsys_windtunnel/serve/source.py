"""The pipelines that ``mlsys windtunnel serve`` was given, so that one that was unloaded can be loaded again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from mlsys_core.errors import InvalidInputError

from mlsys_windtunnel.serve.model import ServedPipeline


class PipelineSource:
    """A source of models, each known by its file's name without the ending.

    Args:
        build: Loads the pipeline of a path under a name.

    Example:
        >>> PipelineSource(lambda path, name: None).names()
        []
    """

    def __init__(self, build: Callable[[Path, str], ServedPipeline]) -> None:
        self._build = build
        self._paths: dict[str, Path] = {}

    def add(self, path: Path) -> ServedPipeline:
        """Load the pipeline of a path.

        Raises:
            InvalidInputError: as its build; or another path has its name.
        """
        name = (
            path.resolve().name.removesuffix(path.suffix) if path.suffix in (".pt2", ".onnx") else path.resolve().name
        )
        if name in self._paths:
            raise InvalidInputError(f"{path}: there is a model {name!r} already; give files of different names")
        model = self._build(path, name)
        self._paths[name] = path
        return model

    def names(self) -> Sequence[str]:
        """Return the names of all models that were added, sorted."""
        return sorted(self._paths)

    async def load(self, name: str) -> Sequence[ServedPipeline]:
        """Load a model again, in a thread."""
        if name not in self._paths:
            raise InvalidInputError(f"no model {name!r} here; there are: {', '.join(self.names()) or 'none'}")
        return [await asyncio.to_thread(self._build, self._paths[name], name)]
