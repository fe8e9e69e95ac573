"""Services: a model between two functions of Python, behind ``POST /predict`` and the protocol of models.

BatchMaker's and DVABatch's services say how their engine is made and asked; the rest is here.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import FastAPI
from mlsys_core.errors import InvalidInputError
from mlsys_core.plugins import installed_plugins
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector
from pydantic_core import from_json, to_json
from starlette.requests import Request
from starlette.responses import Response

from mlsys_serving.extensions import Extensions
from mlsys_serving.http.bodies import parse_json, plain_body
from mlsys_serving.http.runtime import Router
from mlsys_serving.http.server import BackgroundServer, ServerAddress, serve
from mlsys_serving.http.streaming import RequestThreads
from mlsys_serving.isolation.halves import NotFiniteError
from mlsys_serving.models import ModelRepository, UnaryModel, create_model_app

Served = TypeVar("Served", bound=UnaryModel)
_REFUSALS = (ValueError, KeyError, TypeError)  # of preprocessing: the client's fault


@dataclass(frozen=True, slots=True)
class Processing:
    """Functions before and behind a model.

    Example:
        >>> Processing(before=lambda body: body["x"]).made({"x": 3})
        3
    """

    before: Callable[[Any], Any] | None = None  # a request's body -> what the model takes; None: as it is
    behind: Callable[[Any], Any] | None = None  # what the model gives -> what JSON can hold; None: as it is

    def made(self, body: Any) -> Any:
        """Return the model's input for a body: a JSON value, or bytes.

        Raises:
            InvalidInputError: The function raised it, or a ValueError, KeyError or TypeError: 400.
        """
        if self.before is None:
            return body
        try:
            return self.before(body)
        except InvalidInputError:
            raise
        except _REFUSALS as error:
            raise InvalidInputError(f"the request was refused: {type(error).__name__}: {error}") from error

    def answer(self, result: Any) -> Any:
        """Return the answer for what the model gave."""
        return result if self.behind is None else self.behind(result)


class PredictService(ABC, Generic[Served]):
    """A model with functions before and behind it, and the ways to serve it.

    Args:
        processing: The functions.
        num_workers: Threads for them.
    """

    system: ClassVar[str]  # the subsystem, for server extensions

    def __init__(self, processing: Processing, num_workers: int) -> None:
        self._processing = processing
        self._num_workers = num_workers

    @abstractmethod
    def describe(self) -> str:
        """Return the service's name and how it runs, in a few words."""

    @abstractmethod
    def make_served(self, threads: RequestThreads) -> Served:
        """Return the model with an engine of its own; its ``close`` closes ``threads`` too."""

    @abstractmethod
    def fit(self, made: Any) -> Any:
        """Return what preprocessing made as the engine takes it.

        Raises:
            InvalidInputError: The model does not take it.
        """

    @abstractmethod
    async def ask(self, served: Served, request: Any, key: str) -> Any:
        """Return the engine's result for what :meth:`fit` gave; cancelled, the request leaves the engine."""

    def collectors(self, served: Served) -> Sequence[Collector]:
        """Return the collectors of the engine's metrics."""
        return ()

    def app(self) -> FastAPI:
        """Return a new app with ``POST /predict``, health, metrics, and what the installed extensions add."""
        threads, numbers = RequestThreads("service", num_small=self._num_workers), itertools.count()
        served = self.make_served(threads)
        registry = CollectorRegistry()
        for collector in self.collectors(served):
            registry.register(collector)

        async def run(request: Any) -> Any:
            return await self.ask(served, request, f"predict {next(numbers)}")

        return create_model_app(
            ModelRepository([served]),
            system=self.system,
            extensions=Extensions.of(self.system, installed_plugins().registry),
            routers=[predict_router(run, self._processing, threads, fit=self.fit)],
            registry=registry,
        )

    def run(self, port: int = 8000, host: str = "127.0.0.1") -> int:
        """Serve until SIGTERM or SIGINT, then drain; return the exit code.

        Args:
            port: 0 takes a free one.
            host: Address to listen on.
        """

        def tell(address: ServerAddress) -> None:
            print(f"{self.describe()}: POST {address.url}/predict", flush=True)

        return serve(self.app(), host, port, on_ready=tell)

    def background(self, port: int = 0) -> AbstractContextManager[BackgroundServer]:
        """Return a server in a thread, a context manager whose value has the ``url``; for tests and notebooks."""
        return BackgroundServer(self.app(), port=port)


def predict_router(
    run: Callable[[Any], Awaitable[Any]],
    processing: Processing,
    threads: RequestThreads,
    *,
    fit: Callable[[Any], Any] = lambda made: made,
) -> Router:
    """Return a router with ``POST /predict``.

    Args:
        run: The model: what ``fit`` gave -> result.
        processing: Called in ``threads``, like reading the body and writing the answer.
        threads: With some for small work, unless both functions take microseconds.
        fit: What ``processing.before`` made -> what the model takes, with errors that teach.
    """
    router = Router()

    @router.post("/predict")
    async def predict(request: Request) -> Response:
        """Answer one request: a JSON value, or bytes where the content type names no JSON."""
        content = await plain_body(request)
        is_json = "json" in request.headers.get("content-type", "json")
        made = await threads.run(
            lambda: fit(processing.made(parse_json(content) if is_json else content)), size=len(content)
        )
        result = await run(made)
        answer = await threads.run(lambda: _written(processing.answer(result)))
        return Response(answer, media_type="application/json")

    return router


def _written(answer: Any) -> bytes:
    """Return an answer as JSON.

    Raises:
        NotFiniteError: It holds NaN or infinity, which JSON has not.
    """
    written = to_json(answer, fallback=_plain)
    if b"NaN" in written or b"Infinity" in written:  # in a text, or as a number
        try:
            from_json(written, allow_inf_nan=False)
        except ValueError as error:
            raise NotFiniteError("a number of the answer") from error
    return written


def _plain(value: Any) -> Any:
    """Return an array or number of NumPy or torch as JSON has it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is nothing that JSON can hold")
