"""A stream behind the front: sequences of requests, as Triton's sequence batcher has them.

A request has the parameters ``sequence_id`` (a number or a text), ``sequence_start`` and ``sequence_end``, and any
number of frames; it is answered when they are. A request without an id is a stream of its own: a whole recording.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_serving.models import DataType, Executions, InferRequest, InferResponse, ModelSpec, TensorSpec
from mlsys_serving.models.model import flag
from numpy.typing import NDArray

from mlsys_batchmaker.streams.engine import StreamEngine
from mlsys_batchmaker.streams.frames import Answered, StreamConfig, UnknownStreamError
from mlsys_batchmaker.streams.model import StreamModel

_TYPES = {"int64": DataType.INT64, "float32": DataType.FP32}
_PART = 64  # frames that a request gives at once; the next follow their answers


class _Part:
    """Answers of one request's frames, as they come."""

    __slots__ = ("done", "missing", "values")

    def __init__(self, count: int) -> None:
        self.missing = count
        self.values: list[NDArray[Any]] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class OipStream:
    """A :class:`~mlsys_serving.models.UnaryModel` whose requests belong to sequences.

    Args:
        model: the stream.
        name: under which it is served.
        config: settings of its engine.
        version: version of the model.
    """

    def __init__(
        self, model: StreamModel, *, name: str, config: StreamConfig | None = None, version: str = "1"
    ) -> None:
        self.model = model
        frame, answer = model.spec.frame, model.spec.answer
        self._is_sound = model.spec.sample_rate is not None
        shape = (-1,) if self._is_sound else (-1, *frame.shape)
        parameters = {"stream": model.spec.name, "frame_s": str(model.spec.frame_s)}
        if self._is_sound:
            parameters["frame_size"] = str(frame.shape[0])  # samples
        self.spec = ModelSpec(
            name=name,
            version=version,
            platform="mlsys_batchmaker_stream",
            inputs=(TensorSpec(frame.name, _TYPES[frame.dtype], shape, finite_only=frame.dtype == "float32"),),
            outputs=(TensorSpec(answer.name, _TYPES[answer.dtype], (-1, *answer.shape)),),
            parameters=parameters,
            is_stateful=True,
        )
        self.executions = Executions()
        self.is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._orders: weakref.WeakValueDictionary[Hashable, asyncio.Lock] = weakref.WeakValueDictionary()
        # by sequence, while a request holds or awaits it: one gives its frames after the other
        self.engine = StreamEngine(
            model, config, on_batch=lambda size, seconds: self.executions.record(size, compute_infer_s=seconds)
        )
        self.score_source = self.engine.score_source

    async def infer(self, request: InferRequest) -> InferResponse:
        """Return the answers to the request's frames, in their order."""
        self._loop = asyncio.get_running_loop()
        frames = self._frames(request)
        parameters = request.parameters
        sequence = parameters.get("sequence_id", 0)
        starts, ends = flag(parameters, "sequence_start"), flag(parameters, "sequence_end")
        if isinstance(sequence, bool | float) or not isinstance(sequence, int | str):
            raise InvalidInputError(f"sequence_id is a whole number or a text, got {sequence!r}")
        if not sequence:
            if starts or ends:
                raise InvalidInputError("sequence_start and sequence_end need a sequence_id that is not 0 or empty")
            return await self._alone(request, frames)
        order = self._orders.get(sequence) or self._orders.setdefault(sequence, asyncio.Lock())
        async with order:  # first come, first served
            if starts:
                self._restart(sequence)
            elif sequence not in self.engine:
                raise UnknownStreamError(
                    f"sequence {sequence!r} of model {self.spec.name!r} is not open: its first request has "
                    "sequence_start; one without requests ends after a while"
                )
            parts = await self._give(sequence, frames, request.deadline_s, ends=ends)
        await _all_of(parts)
        return self._response(parts)

    async def close(self) -> None:
        """Stop the engine."""
        self.is_closed = True
        await asyncio.to_thread(self.engine.close)

    def _frames(self, request: InferRequest) -> NDArray[Any]:
        port = self.model.spec.frame
        given = request.inputs[port.name]
        if not self._is_sound:
            return np.ascontiguousarray(given)
        (size,) = port.shape
        if len(given) % size:
            raise InvalidInputError(
                f"{port.name!r} has {len(given)} samples, which is no multiple of {size}: fill up the last with zeros"
            )
        return np.ascontiguousarray(given).reshape(-1, size)

    async def _alone(self, request: InferRequest, frames: NDArray[Any]) -> InferResponse:
        if not len(frames):
            return self._response([])
        name = ("request", request.key)
        self.engine.open(name, self._sink)
        try:
            parts = await self._give(name, frames, request.deadline_s, ends=True)
            await _all_of(parts)
        except BaseException:
            if name in self.engine:
                self.engine.close_stream(name)
            raise
        return self._response(parts)

    def _restart(self, sequence: Hashable) -> None:
        """Begin a sequence; as Triton does, one that is open ends, and what waits of it is told so."""
        if sequence in self.engine:
            for dropped in self.engine.close_stream(sequence):
                _fail(dropped.token, ServingError(f"sequence {sequence!r} was started again before this was answered"))
        self.engine.open(sequence, self._sink)

    async def _give(
        self, sequence: Hashable, frames: NDArray[Any], deadline_s: float | None, *, ends: bool
    ) -> list[_Part]:
        """Push all frames in order, each part after the answers of the one before.

        A sequence that got some parts of a request and not the others is ended: its later answers would be wrong.
        """
        parts: list[_Part] = []
        if not len(frames) and ends:
            self.engine.close_stream(sequence, after_pending=True)
        try:
            for start in range(0, len(frames), _PART):
                if parts:
                    await asyncio.shield(parts[-1].done)
                values = frames[start : start + _PART]
                part = _Part(len(values))
                is_last = ends and start + _PART >= len(frames)
                self.engine.push_many(sequence, values, deadline_s=deadline_s, is_last=is_last, token=part)
                parts.append(part)
        except BaseException:
            if parts and sequence in self.engine:
                for dropped in self.engine.close_stream(sequence):
                    _fail(dropped.token, ServingError(f"sequence {sequence!r} ended: a request of it was cut off"))
            raise
        return parts

    def _sink(self, answers: Sequence[Answered]) -> None:
        """Hand a batch's answers to the event loop; in a worker's thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(_deliver, answers)

    def _response(self, parts: Sequence[_Part]) -> InferResponse:
        port = self.model.spec.answer
        values = [value for part in parts for value in part.values]
        outputs = np.stack(values) if values else np.empty((0, *port.shape), dtype=port.dtype)
        return InferResponse({port.name: outputs})


async def _all_of(parts: Sequence[_Part]) -> None:
    for part in parts:
        await part.done


def _deliver(answers: Sequence[Answered]) -> None:
    for each in answers:
        part: _Part = each.frame.token
        if each.error is not None:
            _fail(part, each.error)
            continue
        assert each.value is not None
        part.values.append(each.value)
        part.missing -= 1
        if not part.missing and not part.done.done():
            part.done.set_result(None)


def _fail(part: _Part, error: Exception) -> None:
    if not part.done.done():
        part.done.set_exception(error)
