"""One version of a model as the front holds it: the model, its abilities, its statistics, and its users."""

from __future__ import annotations

import asyncio

from mlsys_core.errors import InvalidInputError

from mlsys_serving.models.model import Model, StreamingModel, UnaryModel
from mlsys_serving.models.spec import NO_SETTINGS, ModelSettings
from mlsys_serving.models.statistics import VersionStatistics


class Version:
    """A model in a repository, prepared for requests.

    Args:
        model: a :class:`UnaryModel`, a :class:`StreamingModel`, or both.
        settings: its configuration.

    Raises:
        InvalidInputError: it is neither, or the configuration says something else than the model is.
    """

    def __init__(self, model: Model, settings: ModelSettings = NO_SETTINGS) -> None:
        self.model, self.settings = model, settings
        self.spec = settings.applied(model.spec)
        self.unary = model if isinstance(model, UnaryModel) else None
        self.streaming = model if isinstance(model, StreamingModel) else None
        if self.unary is None and self.streaming is None:
            raise InvalidInputError(f"model {self.spec.name!r} has neither infer() nor stream()")
        self.statistics = VersionStatistics(model)
        self.inputs = {tensor.name: tensor for tensor in self.spec.inputs}
        self.outputs = {tensor.name: tensor for tensor in self.spec.outputs}
        self.required_inputs = frozenset(tensor.name for tensor in self.spec.inputs if not tensor.optional)
        self.output_names = tuple(self.outputs)
        self._num_running = 0
        self._idle: asyncio.Event | None = None  # made by the retirement that waits on it

    @property
    def num_running(self) -> int:
        """Number of requests that hold it and have not released it."""
        return self._num_running

    def hold(self) -> None:
        """Keep the model from being closed until :meth:`release`, which must follow."""
        self._num_running += 1

    def release(self) -> None:
        """Release the model from one request."""
        self._num_running -= 1
        if self._num_running == 0 and self._idle is not None:
            self._idle.set()

    async def retire(self) -> None:
        """Wait until nothing holds it, then close the model."""
        self._idle = asyncio.Event()
        if self._num_running:
            await self._idle.wait()
        await self.model.close()
