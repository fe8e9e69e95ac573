"""Models to test the front with: each does one simple thing that can be checked by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
from mlsys_serving.models import DataType, Executions, InferRequest, InferResponse, ModelSpec, TensorSpec, Timing


class Model:
    """Notes what happened to it."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.requests: list[InferRequest] = []
        self.num_cancelled = 0
        self.is_held = False  # whether it waits with its answers
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True


class Add(Model):
    """``sum`` = ``a`` + ``b``, elementwise: FP32 rows of any length; ``b`` may be left out."""

    def __init__(self, *, version: str = "1", max_batch_size: int = 8) -> None:
        row = (-1, -1)
        super().__init__(
            ModelSpec(
                name="add",
                version=version,
                inputs=(
                    TensorSpec("a", DataType.FP32, row, finite_only=True),
                    TensorSpec("b", DataType.FP32, row, optional=True),
                ),
                outputs=(TensorSpec("sum", DataType.FP32, row, labels=("zero", "one", "two")),),
                max_batch_size=max_batch_size,
                parameters={"doc": "adds"},
            )
        )

    async def infer(self, request: InferRequest) -> InferResponse:
        self.requests.append(request)
        delay_s = request.parameters.get("delay_s", 0)
        try:
            await asyncio.sleep(float(delay_s))
            while self.is_held:
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        total = request.inputs["a"]
        if "b" in request.inputs:
            total = total + request.inputs["b"]
        return InferResponse({"sum": total}, timing=Timing(queue_s=0.25, compute_infer_s=0.5))


class Echo(Model):
    """Gives back each input it gets, one of every datatype, shape [-1, -1]."""

    def __init__(self) -> None:
        inputs = tuple(TensorSpec(d.value.lower(), d, (-1, -1), optional=True) for d in DataType)
        outputs = tuple(TensorSpec(f"{d.value.lower()}_out", d, (-1, -1)) for d in DataType)
        super().__init__(ModelSpec(name="echo", inputs=inputs, outputs=outputs))

    async def infer(self, request: InferRequest) -> InferResponse:
        self.requests.append(request)
        outputs: dict[str, Any] = {f"{name}_out": array for name, array in request.inputs.items()}
        for spec in self.spec.outputs:
            outputs.setdefault(spec.name, np.empty((0, 0), spec.datatype.dtype))
        return InferResponse(outputs, parameters=request.parameters)


class Repeat(Model):
    """Streams ``text`` back, one word a response, ``times`` times; fails after as many words as ``fail_after`` says."""

    def __init__(self) -> None:
        super().__init__(
            ModelSpec(
                name="repeat",
                inputs=(
                    TensorSpec("text", DataType.BYTES, (1,), utf8_only=True),
                    TensorSpec("times", DataType.INT32, (1,), optional=True),
                ),
                outputs=(TensorSpec("word", DataType.BYTES, (1,)), TensorSpec("index", DataType.INT32, (1,))),
            )
        )

    async def stream(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        self.requests.append(request)
        times = int(request.inputs["times"][0]) if "times" in request.inputs else 1
        words = request.inputs["text"][0].split() * times
        delay_s = float(request.parameters.get("delay_s", 0))
        try:
            for index, word in enumerate(words):
                if index == request.parameters.get("fail_after"):
                    raise RuntimeError("a defect of the model")
                await asyncio.sleep(delay_s)
                yield InferResponse(
                    {"word": np.array([word], np.object_), "index": np.array([index], np.int32)},
                    parameters={"is_last": index == len(words) - 1},
                )
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            raise


class Upper(Model):
    """``text_output`` = ``text_input`` in capitals, in batches that it counts itself."""

    def __init__(self) -> None:
        self.executions = Executions()
        super().__init__(
            ModelSpec(
                name="upper",
                inputs=(TensorSpec("text_input", DataType.BYTES, (-1, 1), utf8_only=True),),
                outputs=(TensorSpec("text_output", DataType.BYTES, (-1, 1)),),
                max_batch_size=4,
            )
        )

    async def infer(self, request: InferRequest) -> InferResponse:
        self.requests.append(request)
        self.executions.record(4, compute_infer_s=0.125)
        texts = [element.decode().upper().encode() for element in request.inputs["text_input"].ravel().tolist()]
        return InferResponse({"text_output": np.array(texts, np.object_).reshape(-1, 1)})


class Broken(Model):
    """Answers wrongly in the way its parameter ``how`` names."""

    def __init__(self) -> None:
        x = TensorSpec("x", DataType.FP32, (-1,))
        super().__init__(ModelSpec(name="broken", inputs=(x,), outputs=(TensorSpec("y", DataType.FP32, (-1,)),)))

    async def infer(self, request: InferRequest) -> InferResponse:
        how = request.parameters.get("how")
        if how == "raises":
            raise KeyError("secret")
        outputs: dict[str, dict[str, Any]] = {
            "dtype": {"y": np.zeros(2, np.float64)},
            "shape": {"y": np.zeros((2, 2), np.float32)},
            "missing": {},
            "nan": {"y": np.array([np.nan], np.float32)},
        }
        return InferResponse(outputs[str(how)])


def all_models() -> list[Model]:
    """One of each."""
    return [Add(), Echo(), Repeat(), Upper(), Broken()]
