"""Run checked requests on models, for both fronts alike: deadlines, statistics, the model's errors.

In the event loop's thread, but for reading large inputs. A request counts from ``started_s``, when its front began to
decode it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial

import numpy as np
from mlsys_core.loop.protocols import Clock
from mlsys_serving.http.describe import describe
from mlsys_serving.http.streaming import LARGE, RequestThreads
from mlsys_serving.models.datatypes import Array
from mlsys_serving.models.errors import DeadlineExceededError, UnsupportedError
from mlsys_serving.models.model import InferRequest, InferResponse, Parameter, Timing, UnaryModel
from mlsys_serving.models.repository import ModelRepository
from mlsys_serving.models.spec import TensorSpec
from mlsys_serving.models.statistics import FailureReason
from mlsys_serving.models.version import Version
from mlsys_serving.tracing.record import current_trace

from mlsys_open_inference.binding import WireRequest, bind, checked_outputs


class Answer:
    """One response to one request, ready to be encoded."""

    __slots__ = ("outputs", "parameters", "request", "version")

    def __init__(
        self,
        version: Version,
        request: InferRequest,
        outputs: list[tuple[TensorSpec, Array]],
        parameters: dict[str, Parameter],
    ) -> None:
        self.version = version
        self.request = request
        self.outputs = outputs  # those the client wants, in its order
        self.parameters = parameters

    @property
    def nbytes(self) -> int:
        """Bytes of the outputs; elements of BYTES are looked at only where they are few, and count as pointers else."""
        return sum(
            array.nbytes + sum(map(len, array.ravel()))
            if array.dtype == np.object_ and array.nbytes < LARGE
            else array.nbytes
            for _, array in self.outputs
        )


class Engine:
    """The part of the front that REST and gRPC share: it runs requests on models.

    Args:
        repository: the models.
        clock: of deadlines and durations.
        threads: for large work; belong to the caller. Default threads of its own.
    """

    def __init__(self, repository: ModelRepository, clock: Clock, threads: RequestThreads | None = None) -> None:
        self.repository = repository
        self.threads = threads or RequestThreads("mlsys-oip")
        self.now: Callable[[], float] = clock.now

    async def infer(self, version: Version, wire: WireRequest, *, started_s: float, deadline_s: float | None) -> Answer:
        """Return the one response of a unary model.

        Raises:
            InvalidInputError: the request does not fit the model.
            UnsupportedError: the model only streams.
            DeadlineExceededError: it took too long; the model's work was cancelled.
            Exception: the model's own.
        """
        if version.unary is None:
            raise UnsupportedError(
                f"model {version.spec.name!r} gives any number of responses; ask by ModelStreamInfer"
            )
        version.hold()
        _note_model(version)
        try:
            request = await self._bound(wire, version, started_s, deadline_s)
            response = await self._asked(version.unary, request)
            check = partial(checked_outputs, response, request, version, is_partial=False)
            outputs = await self.threads.run(check, size=_num_object_nbytes(response))
        except BaseException as error:
            version.statistics.fail(_reason(error), self.now() - started_s)
            raise
        finally:
            version.release()
        self._succeed(version, request, started_s, response.timing)
        return Answer(version, request, outputs, dict(response.parameters))

    async def _asked(self, model: UnaryModel, request: InferRequest) -> InferResponse:
        if request.deadline_s is None:
            return await model.infer(request)
        async with _deadline(request.deadline_s - self.now()):
            return await model.infer(request)

    async def stream(
        self, version: Version, wire: WireRequest, *, started_s: float, deadline_s: float | None
    ) -> AsyncGenerator[Answer, None]:
        """Yield all responses of a streaming model, or the one of a unary model. Raises as :meth:`infer`; close it."""
        if version.streaming is None:
            yield await self.infer(version, wire, started_s=started_s, deadline_s=deadline_s)
            return
        timing: Timing | None = None
        is_first = True
        version.hold()
        _note_model(version)
        try:
            request = await self._bound(wire, version, started_s, deadline_s)
            responses = version.streaming.stream(request)
            async with aclosing(responses):
                while True:
                    left_s = None if request.deadline_s is None else request.deadline_s - self.now()
                    async with _deadline(left_s):
                        response = await anext(responses, None)
                    if response is None:
                        break
                    if is_first:
                        version.statistics.first_response_histogram.add(self.now() - started_s)
                        is_first = False
                    timing = response.timing or timing
                    outputs = checked_outputs(response, request, version, is_partial=True)
                    yield Answer(version, request, outputs, dict(response.parameters))
        except BaseException as error:
            version.statistics.fail(_reason(error), self.now() - started_s)
            raise
        finally:
            version.release()
        self._succeed(version, request, started_s, timing)

    async def _bound(
        self, wire: WireRequest, version: Version, started_s: float, deadline_s: float | None
    ) -> InferRequest:
        read = partial(bind, wire, version, now=started_s, deadline_s=deadline_s)
        return await self.threads.run(read, size=wire.size)

    def _succeed(self, version: Version, request: InferRequest, started_s: float, timing: Timing | None) -> None:
        duration_s = self.now() - started_s
        version.statistics.succeed(request.num_rows, duration_s, timing, now_ms=time.time_ns() // 1_000_000)


def _note_model(version: Version) -> None:
    trace = current_trace.get()
    if trace is not None:
        trace.facts["mlsys.model"], trace.facts["mlsys.model.version"] = version.spec.name, version.spec.version


def _num_object_nbytes(response: InferResponse) -> int:
    """Return the bytes of pointers to elements of BYTES, each of which is looked at."""
    return sum(array.nbytes for array in response.outputs.values() if getattr(array, "dtype", None) == np.object_)


@asynccontextmanager
async def _deadline(timeout_s: float | None) -> AsyncGenerator[None, None]:
    """Limit the time of a block like ``asyncio.timeout``, with this package's error; None waits without bound."""
    timeout = asyncio.timeout(None if timeout_s is None else max(timeout_s, 0.0))
    try:
        async with timeout:
            yield
    except TimeoutError:
        if not timeout.expired():
            raise  # the model's own
        raise DeadlineExceededError("the request's deadline passed before its answer was there") from None


def _reason(error: BaseException) -> FailureReason:
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return FailureReason.CANCELED
    status = describe(error).status
    if status in (429, 503, 504):
        return FailureReason.REJECTED
    return FailureReason.OTHER if status < 500 else FailureReason.BACKEND
