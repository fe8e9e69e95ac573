"""A pipeline as a model of core's front: raw columns in, labels and probabilities out, requests batched by core's loop.

A batch is the rows of several requests. If it is refused, each of its requests is asked for by itself, so that a row
that the source refuses fails its own request alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import ServeRequest, ServingLoop, ThreadExecutor, WallClock
from mlsys_core.loop.baselines import RequestBatch, ZeroBatch
from mlsys_serving.models import DataType, Executions, InferRequest, InferResponse, LoopClient, ModelSpec, TensorSpec
from mlsys_serving.tracing import EngineTraces
from mlsys_serving.watch import BatchSource

from mlsys_windtunnel.export.host_parts import MISSING_TEXTS, Code, Codes, Column, HostPlan, keys_of
from mlsys_windtunnel.export.host_plan import plan_host
from mlsys_windtunnel.export.onnx_rows import ARRAY

Columns = Mapping[str, npt.NDArray[Any]]  # [rows] by name, or [rows, width] under ARRAY
Answers = dict[str, npt.NDArray[Any]]  # by output, each with as many rows
NAMES = {"predict": "prediction", "predict_proba": "probabilities", "decision_function": "scores"} | {
    "transform": "features"
}
_TYPES = {
    "string": DataType.BYTES,
    "double": DataType.FP64,
    "float": DataType.FP32,
    "int64": DataType.INT64,
    "bool": DataType.BOOL,
}
_OUTPUTS = {"U": DataType.BYTES, "O": DataType.BYTES, "i": DataType.INT64, "f": DataType.FP64, "b": DataType.BOOL}


class ServedPipeline:
    """One pipeline and its form on the wire.

    Args:
        answering: What ``load_model`` gives: a module, or a file's pipeline.
        name: Name on the wire.
        max_batch_size: Most rows of a request, and most requests of a batch.
        max_waiting: Most requests waiting.

    Raises:
        InvalidInputError: The name is none, or the columns are of no type that the protocol has.
    """

    def __init__(self, answering: Any, name: str, *, max_batch_size: int = 256, max_waiting: int = 1024) -> None:
        self._answering = answering
        self.plan = plan_host(answering.frontend)
        self.executions = Executions()
        self.methods = _methods(answering)
        classes = getattr(answering, "classes_", ())
        self.classes: list[Any] = np.asarray(classes).tolist()
        is_array = not self.plan.is_named and all(each.type == "double" for each in self.plan.columns)
        self._gaps = {} if is_array else _gaps(self.plan)
        self._is_array = is_array
        self.clock = WallClock()
        self.spec = self._spec(name, max_batch_size)
        self.score_source = BatchSource(label_of=lambda _: name)
        traces = EngineTraces(
            lambda batch: [request.request_id for request in batch.requests], watcher=self.score_source
        )
        self._client: LoopClient[Any, Any, Any] = LoopClient(model=name, traces=traces)
        self._executor: ThreadExecutor[RequestBatch[Columns], list[Any]] = ThreadExecutor(self._run, name=name)
        scheduler: ZeroBatch[Columns, Any] = ZeroBatch(max_batch_size=max_batch_size, max_waiting=max_waiting)
        self.loop: ServingLoop[Any, Any, Any] = ServingLoop(
            scheduler, self._executor, self.clock, listener=self._client, traces=traces
        )
        self.loop.start()

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer the rows of a request of the protocol."""
        if self._is_array:
            columns: Columns = request.inputs
        else:
            columns = {each.name: self._cells(each, request.inputs[each.name][:, 0]) for each in self.plan.columns}
        answers = await self.answer(request.key, columns, priority=request.priority, deadline_s=request.deadline_s)
        return InferResponse({name: _as_bytes(array) for name, array in answers.items()})

    async def answer(
        self, key: str, columns: Columns, *, priority: int = 0, deadline_s: float | None = None
    ) -> Answers:
        """Return the answers for raw columns, batched with other requests'.

        Args:
            key: Name of the request, unique among those that wait.
            columns: ``[rows]`` by name.
            priority: Smaller goes first.
            deadline_s: On the clock of the front.

        Raises:
            InvalidInputError: The source refuses the rows.
        """
        length = max(1, len(next(iter(columns.values()))))
        request = ServeRequest(key, columns, length=length, priority=priority, deadline_s=deadline_s)
        found: Answers = await self._client.submit(self.loop, request, key)
        return found

    async def close(self) -> None:
        """Stop the loop and its thread."""
        await asyncio.to_thread(self.loop.stop)
        self._executor.close()

    def _run(self, batch: RequestBatch[Columns]) -> list[Any]:
        """Return the answers of each request of a batch, or its error."""
        parts = [request.payload for request in batch.requests]
        sizes = [len(next(iter(part.values()))) for part in parts]
        start = self.clock.now()
        try:
            found: list[Any] = self._split(self._answers(_joined(parts)), sizes)
        except InvalidInputError:
            found = [self._alone(part) for part in parts]
        self.executions.record(sum(sizes), compute_infer_s=self.clock.now() - start)
        return found

    def _alone(self, part: Columns) -> Answers | InvalidInputError:
        try:
            return self._answers(part)
        except InvalidInputError as error:
            return error

    def _answers(self, columns: Columns) -> Answers:
        if self._is_array:
            rows: Any = columns[ARRAY]
        elif self.plan.is_named:
            rows = columns
        else:  # an array of objects, of which some columns are read
            rows = np.zeros((len(next(iter(columns.values()))), self.plan.width), object)
            for each, index in zip(self.plan.columns, self.plan.indices, strict=True):
                rows[:, index] = columns[each.name]
        return {name: np.asarray(getattr(self._answering, method)(rows)) for method, name in self.methods.items()}

    @staticmethod
    def _split(answers: Answers, sizes: Sequence[int]) -> list[Answers]:
        ends = np.cumsum(sizes)[:-1]
        each = {name: np.split(array, ends) for name, array in answers.items()}
        return [{name: pieces[index] for name, pieces in each.items()} for index in range(len(sizes))]

    def _cells(self, column: Column, cells: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if column.type != "string":
            return cells
        gaps = self._gaps[column.name]
        texts = [cell.decode() for cell in cells.tolist()]
        return np.array([gaps.get(text, text) for text in texts], object)

    def _spec(self, name: str, max_batch_size: int) -> ModelSpec:
        if self._is_array:
            inputs: tuple[TensorSpec, ...] = (TensorSpec(ARRAY, DataType.FP64, (-1, self.plan.width)),)
        else:
            inputs = tuple(
                TensorSpec(each.name, _TYPES[each.type], (-1, 1), utf8_only=each.type == "string")
                for each in self.plan.columns
            )
        labels = tuple(map(str, self.classes))
        outputs = []
        for method, output in self.methods.items():
            kind, width = _shape(self._answering, method)
            shape = (-1,) if width is None else (-1, width)
            outputs.append(TensorSpec(output, kind, shape, labels=labels if output == "probabilities" else ()))
        return ModelSpec(
            name=name,
            inputs=inputs,
            outputs=tuple(outputs),
            platform="mlsys_windtunnel",
            max_batch_size=max_batch_size,
            parameters={"classes": str(self.classes)} if self.classes else {},
        )


def _methods(answering: Any) -> dict[str, str]:
    """Return the names of the outputs by the methods that give them."""
    offered = [name for name in ("predict", "predict_proba", "transform") if hasattr(answering, name)]
    if "predict" in offered and "predict_proba" not in offered and hasattr(answering, "decision_function"):
        offered.append("decision_function")
    if "predict" in offered:
        offered = [name for name in offered if name != "transform"]
    is_classifier = len(getattr(answering, "classes_", ())) > 0
    return {name: "label" if name == "predict" and is_classifier else NAMES[name] for name in offered}


def _shape(answering: Any, method: str) -> tuple[DataType, int | None]:
    """Return the datatype of an answer and its columns, None of a flat one: as two rows of nothing are answered."""
    plan = plan_host(answering.frontend)
    empty: dict[str, Any] = {"string": "", "bool": False}
    cells = {each.name: np.array([empty.get(each.type, 0)] * 2, object) for each in plan.columns}
    if plan.is_named:
        rows: Any = {
            each.name: cells[each.name] if each.type == "string" else cells[each.name].astype(_TYPES[each.type].dtype)
            for each in plan.columns
        }
    else:
        rows = np.zeros((2, plan.width), object if any(each.type == "string" for each in plan.columns) else float)
    try:
        answer = getattr(answering, method)(rows)
    except InvalidInputError:  # zeros are refused, as by an encoder of known categories
        return _declared(answering, method)
    if isinstance(answer, list):
        raise InvalidInputError("a classifier of several outputs cannot be served; serve one model for each output")
    array = np.asarray(answer)
    return _OUTPUTS[array.dtype.kind], None if array.ndim == 1 else array.shape[1]


def _declared(answering: Any, method: str) -> tuple[DataType, int | None]:
    """Return the datatype and columns of an answer as the classes tell them."""
    classes = np.asarray(getattr(answering, "classes_", ()))
    if method == "predict":
        return (_OUTPUTS[classes.dtype.kind] if len(classes) else DataType.FP64), None
    if method == "decision_function" and len(classes) == 2:
        return DataType.FP64, None
    return DataType.FP64, len(classes) if len(classes) else -1


def _gaps(plan: HostPlan) -> dict[str, dict[str, Any]]:
    """Return for each column of text the texts that stand for missing cells, and these."""
    found: dict[str, dict[str, Any]] = {each.name: {} for each in plan.columns}
    for part in plan.tables:
        for code in part.columns if isinstance(part, Codes) else ():
            if isinstance(code, Code) and plan.columns[code.cells.column].type == "string":
                column = plan.columns[code.cells.column]
                texts = {*keys_of(code, column)} - {*code.categories}
                found[column.name] |= {text: MISSING_TEXTS[text] for text in texts & MISSING_TEXTS.keys()}
    return found


def _joined(parts: Sequence[Columns]) -> Columns:
    return parts[0] if len(parts) == 1 else {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _as_bytes(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return texts as the protocol has them: bytes among objects."""
    if array.dtype.kind not in "UO":
        return array
    made = np.empty(array.shape, object)
    made[:] = [str(text).encode() for text in array.tolist()]
    return made
