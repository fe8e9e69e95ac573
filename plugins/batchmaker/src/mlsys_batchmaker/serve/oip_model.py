"""One model behind the front: its engine answers ``infer``, and ``stream`` word by word where chains give words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import numpy as np
from mlsys_serving.http.streaming import RequestThreads
from mlsys_serving.models import DataType, Executions, InferRequest, InferResponse, ModelSpec, TensorSpec, Timing

from mlsys_batchmaker.engine import Answer, Engine, EngineConfig
from mlsys_batchmaker.models.model import Model, Payload, Tensor
from mlsys_batchmaker.scheduling.requests import Values
from mlsys_batchmaker.scheduling.tasks import Round, RoundOutput
from mlsys_batchmaker.workers.materialise import MaterialisedCell

_TYPES = {"int64": DataType.INT64, "float32": DataType.FP32, "bytes": DataType.BYTES}


class OipModel:
    """A :class:`~mlsys_serving.models.UnaryModel` and :class:`~mlsys_serving.models.StreamingModel`.

    A request is one sequence or tree: there is no batch dimension, the engine batches cells.

    Args:
        model: model to serve.
        config: settings of its engine.
        version: version of the model.
        cells: the model's, where they have been made ready already.
        threads: closed with the model.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        version: str = "1",
        cells: Sequence[MaterialisedCell] | None = None,
        threads: RequestThreads | None = None,
    ) -> None:
        self.model = model
        self._threads = threads
        self.spec = spec_of(model, config, version=version)
        self.executions = Executions()
        self.is_closed = False
        self.engine = Engine(model, config, on_round=self._count, cells=cells)
        self.score_source = self.engine.score_source

    async def infer(self, request: InferRequest) -> InferResponse:
        """Return the whole answer."""
        return _response(await self.answer(request.inputs, request.key))

    async def answer(self, inputs: Payload, key: str) -> Answer:
        """Return the engine's answer; cancelled, the request leaves the engine."""
        future = self.engine.submit(inputs, request_id=key)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self.engine.cancel(key)
            raise

    async def stream(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Yield a response for each node's results as they come, such as a decoder's words one by one."""
        loop = asyncio.get_running_loop()
        parts: asyncio.Queue[Values | None] = asyncio.Queue()

        def hand_over(values: Values) -> None:  # in the serving loop's thread
            loop.call_soon_threadsafe(parts.put_nowait, values)

        future = self.engine.submit(request.inputs, request_id=request.key, on_values=hand_over)
        done = asyncio.wrap_future(future)
        done.add_done_callback(lambda _: parts.put_nowait(None))  # after all its values, in the same order
        try:
            while (values := await parts.get()) is not None:
                outputs = self.model.architecture.finish(request.inputs, [values])
                if all(np.asarray(output).size for output in outputs.values()):
                    yield InferResponse(dict(outputs))
            await done
        finally:
            if not done.done():
                self.engine.cancel(request.key)
                done.cancel()

    async def close(self) -> None:
        """Stop the engine."""
        self.is_closed = True
        await asyncio.to_thread(self.engine.close)
        if self._threads is not None:
            self._threads.close()

    def _count(self, batch: Round, output: RoundOutput) -> None:
        """Count one execution for each step of a task."""
        num_steps = sum(task.steps for task in batch.tasks)
        seconds = (output.ended_s - output.started_s) / num_steps
        for task in batch.tasks:
            for step in range(task.steps):
                size = task.size if task.lengths is None else int((task.lengths > step).sum())
                self.executions.record(size, compute_infer_s=seconds)


def spec_of(model: Model, config: EngineConfig, *, version: str = "1") -> ModelSpec:
    """Return a model's form on the wire."""
    architecture = model.architecture
    return ModelSpec(
        name=model.name,
        version=version,
        platform="mlsys_batchmaker",
        inputs=tuple(_spec(tensor, is_input=True) for tensor in architecture.inputs),
        outputs=tuple(_spec(tensor) for tensor in architecture.outputs),
        parameters={"architecture": architecture.name, "executor": config.executor},
    )


def _response(answer: Answer) -> InferResponse:
    timing = Timing(queue_s=answer.queue_s, compute_infer_s=answer.compute_s)
    return InferResponse(dict(answer.outputs), parameters={"num_cells": answer.result.num_cells}, timing=timing)


def _spec(tensor: Tensor, *, is_input: bool = False) -> TensorSpec:
    datatype = _TYPES[tensor.dtype]
    return TensorSpec(
        tensor.name,
        datatype,
        tensor.shape,
        optional=tensor.is_optional,
        finite_only=is_input and datatype is DataType.FP32,
        utf8_only=is_input and datatype is DataType.BYTES,
    )
