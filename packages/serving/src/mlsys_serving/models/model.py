"""The protocol that a plugin implements: a model is a spec and one or both ways to answer a request, and its messages.

The front decodes, validates and encodes; a model sees numpy arrays of the datatypes and shapes its spec names. All
methods are called in the event loop's thread: work that takes longer than some 100 us belongs into a thread, a process
or the serving loop (:class:`.loop_client.LoopClient`).
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from mlsys_core.errors import InvalidInputError

from mlsys_serving.models.datatypes import Array
from mlsys_serving.models.spec import ModelSpec

Parameter = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest:
    """One request, decoded and checked against the model's spec: names, datatypes and shapes are right."""

    key: str  # unique in this process; what a scheduler may call the request
    model_name: str
    model_version: str
    inputs: Mapping[str, Array]  # dtypes and shapes as the spec says; read-only, may be views of the request's body
    outputs: tuple[str, ...]  # those the client wants, in its order; more may be given and are dropped
    num_rows: int = 1  # size of the batch dimension; 1 if the model has none
    request_id: str = ""  # the client's own, empty if it gave none; need not be unique
    parameters: Mapping[str, Parameter] = field(default_factory=dict)  # the client's, less those the front understands
    priority: int = 0  # as sent: 0 is the model's default, else 1 goes first, then 2, ...
    deadline_s: float | None = None  # seconds of the front's clock; the front itself ends the request then


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of a request's parts, in seconds; for statistics only."""

    queue_s: float = 0.0
    compute_input_s: float = 0.0  # gathering and padding
    compute_infer_s: float = 0.0
    compute_output_s: float = 0.0  # scattering


@dataclass(frozen=True, slots=True)
class InferResponse:
    """One answer. A unary request has one; a streaming one any number."""

    outputs: Mapping[str, Array]  # as the spec says; non-contiguous ones are copied
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    timing: Timing | None = None  # None: all of the request's time counts as compute_infer


def flag(parameters: Mapping[str, object], name: str) -> bool:
    """Return a parameter that is true or false; False if it is not given.

    Raises:
        InvalidInputError: it is something else.
    """
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise InvalidInputError(f"parameter {name!r} is true or false, got {str(value)[:40]!r}")
    return value


class Model(Protocol):
    """One version of a model. It also is a :class:`UnaryModel`, a :class:`StreamingModel`, or both."""

    @property
    def spec(self) -> ModelSpec:
        """Inputs and outputs of the model; constant."""
        ...

    async def close(self) -> None:
        """Free everything; called once, when no request runs any more."""
        ...


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """All executions of one batch size."""

    batch_size: int  # rows
    count: int = 0
    compute_input_s: float = 0.0
    compute_infer_s: float = 0.0
    compute_output_s: float = 0.0


class Executions:
    """Counts of a model's executions; any thread may record, any may read.

    Example:
        >>> executions = Executions()
        >>> executions.record(8, compute_infer_s=0.25)
        >>> executions.record(8, compute_infer_s=0.25)
        >>> executions.snapshot()
        [BatchCounts(batch_size=8, count=2, compute_input_s=0.0, compute_infer_s=0.5, compute_output_s=0.0)]
    """

    def __init__(self) -> None:
        self.num_repeated = (
            0  # requests that ran again, since the process of the model died; see mlsys_serving.instances
        )
        self._lock = threading.Lock()
        self._counts: dict[int, list[float]] = {}  # batch size -> what follows it in BatchCounts

    def record(
        self,
        batch_size: int,
        *,
        compute_input_s: float = 0.0,
        compute_infer_s: float = 0.0,
        compute_output_s: float = 0.0,
    ) -> None:
        """Record one execution of ``batch_size`` rows, and its times in seconds."""
        self.add(BatchCounts(batch_size, 1, compute_input_s, compute_infer_s, compute_output_s))

    def add(self, counts: BatchCounts) -> None:
        """Add several executions of one batch size."""
        with self._lock:
            sums = self._counts.setdefault(counts.batch_size, [0, 0.0, 0.0, 0.0])
            sums[0] += counts.count
            sums[1] += counts.compute_input_s
            sums[2] += counts.compute_infer_s
            sums[3] += counts.compute_output_s

    def snapshot(self) -> list[BatchCounts]:
        """Return the counts, by ascending batch size."""
        with self._lock:
            return [
                BatchCounts(size, int(self._counts[size][0]), *self._counts[size][1:]) for size in sorted(self._counts)
            ]


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
