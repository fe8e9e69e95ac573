"""The protocol that a plugin implements: a model is a spec and one or both ways to answer a request.

The front decodes, validates and encodes; a model sees numpy arrays of the datatypes and shapes its spec names. All
methods are called in the event loop's thread: work that takes longer than some 100 us belongs into a thread, a process
or the serving loop (:class:`.loop_client.LoopClient`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol, runtime_checkable

from mlsys_serving.models.executions import Executions
from mlsys_serving.models.messages import InferRequest, InferResponse
from mlsys_serving.models.spec import ModelSpec


class Model(Protocol):
    """One version of a model. It also is a :class:`UnaryModel`, a :class:`StreamingModel`, or both."""

    @property
    def spec(self) -> ModelSpec:
        """Inputs and outputs of the model; constant."""
        ...

    async def close(self) -> None:
        """Free everything; called once, when no request runs any more."""
        ...


@runtime_checkable
class UnaryModel(Model, Protocol):
    """A model that gives one response for one request: ``infer``."""

    async def infer(self, request: InferRequest) -> InferResponse:
        """Return the response.

        Cancelled when the client leaves, the deadline passes or the server's time to drain is over: let
        ``CancelledError`` pass and give up the request's queue slot.

        Raises:
            InvalidInputError: the request cannot be served as it is (400, INVALID_ARGUMENT).
            ServingError: it cannot be served now; with ``retry_after_s`` 503, UNAVAILABLE; with ``http_status`` that.
        """
        ...


@runtime_checkable
class StreamingModel(Model, Protocol):
    """A model with any number of responses a request (Triton: decoupled): ``ModelStreamInfer``.

    A model that is no :class:`UnaryModel` as well refuses plain ``infer`` requests.
    """

    def stream(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Return an asynchronous generator of the responses; it is closed in the cases that cancel ``infer``."""
        ...


@runtime_checkable
class CountsExecutions(Protocol):
    """A model that batches requests itself and counts its executions; others count one execution a request."""

    @property
    def executions(self) -> Executions:
        """Counts of the model's executions; the front reads them for statistics and metrics."""
        ...
