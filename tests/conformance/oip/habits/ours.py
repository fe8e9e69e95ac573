"""Serves the models of ``models.py`` from this project on free ports; prints where, and runs until SIGTERM.

python -m tests.conformance.oip.habits.ours
"""

from __future__ import annotations

import asyncio
import io
import json
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from mlsys_batchmaker.plan.spec import Port
from mlsys_batchmaker.serve.stream_model import OipStream
from mlsys_batchmaker.streams.model import StreamSpec
from mlsys_core.loop import ServeRequest, ServingLoop, ThreadExecutor, WallClock
from mlsys_core.loop.baselines import ZeroBatch
from mlsys_open_inference import GrpcConfig, create_oip_app, grpc_address_of
from mlsys_open_inference.files import parsed
from mlsys_serving.http import ServerAddress, serve
from mlsys_serving.http.record import make_logger
from mlsys_serving.models import (
    DataType,
    InferRequest,
    InferResponse,
    LoopClient,
    ModelRepository,
    ModelSpec,
    TensorSpec,
)

from tests.conformance.oip.habits.models import CONFIGS, SETTINGS, VERSIONS

sys.path.insert(0, str(Path(__file__).parents[4] / "plugins" / "open-inference" / "tests"))
from reference import Add, Broken, Echo, Model, Repeat, Upper

X = (TensorSpec("x", DataType.FP32, (-1, 1)),)
CALLS = (TensorSpec("calls", DataType.INT32, (-1, 1)),)


class PlainAdd(Add):
    """Add that takes NaN, too."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = replace(self.spec, inputs=tuple(replace(each, finite_only=False) for each in self.spec.inputs))


class PlainRepeat(Repeat):
    """Repeat without parameters of its own."""

    async def stream(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        async for response in super().stream(request):
            yield InferResponse(response.outputs)


class PlainEcho(Echo):
    """Echo without the request's parameters in its answer, and without BF16, which Triton's python has not."""

    def __init__(self) -> None:
        super().__init__()
        inputs, outputs = (
            tuple(each for each in tensors if each.datatype is not DataType.BF16)
            for tensors in (self.spec.inputs, self.spec.outputs)
        )
        self.spec = replace(self.spec, inputs=inputs, outputs=outputs)

    async def infer(self, request: InferRequest) -> InferResponse:
        return InferResponse((await super().infer(request)).outputs)


class BFloat(Model):
    """Returns its input."""

    def __init__(self) -> None:
        tensors = [TensorSpec(name, DataType.BF16, (-1, -1)) for name in ("x", "y")]
        super().__init__(ModelSpec(name="bfloat", inputs=(tensors[0],), outputs=(tensors[1],), max_batch_size=4))

    async def infer(self, request: InferRequest) -> InferResponse:
        return InferResponse({"y": request.inputs["x"]})


class Fails(Broken):
    """Always fails."""

    async def infer(self, request: InferRequest) -> InferResponse:
        raise KeyError("secret")


class Versioned(Model):
    """Returns its version."""

    def __init__(self, version: str) -> None:
        outputs = (TensorSpec("version", DataType.INT32, (1,)),)
        inputs = (TensorSpec("x", DataType.FP32, (1,)),)
        super().__init__(ModelSpec(name="versioned", version=version, inputs=inputs, outputs=outputs))

    async def infer(self, request: InferRequest) -> InferResponse:
        return InferResponse({"version": np.full((1,), int(self.spec.version), np.int32)})


class Slow(Model):
    """Sleeps as long as asked, one request at a time in a serving loop; returns the number of requests so far."""

    def __init__(self) -> None:
        super().__init__(ModelSpec(name="slow", inputs=X, outputs=CALLS, max_batch_size=1))
        self.calls = 0
        self._client: LoopClient[Any, Any, Any] = LoopClient()
        executor = ThreadExecutor(self._run)
        self._loop = ServingLoop(ZeroBatch(max_batch_size=1), executor, WallClock(), listener=self._client).start()

    def _run(self, batch: Any) -> Sequence[Any]:
        answers = []
        for request in batch.requests:
            time.sleep(float(request.payload))
            self.calls += 1
            answers.append(np.full((1, 1), self.calls, np.int32))
        return answers

    async def infer(self, request: InferRequest) -> InferResponse:
        asked = ServeRequest(
            request.key, request.inputs["x"][0, 0], priority=request.priority, deadline_s=request.deadline_s
        )
        return InferResponse({"calls": await self._client.submit(self._loop, asked, request.key)})

    async def close(self) -> None:
        await asyncio.to_thread(self._loop.stop)


class RunningSum:
    """The stream of running sums: a state of one number."""

    spec = StreamSpec(
        "accumulate", Port("frame", "int64", (1,)), Port("sum", "int64", (1,)), (Port("total", "int64", (1,)),)
    )

    def stepper(self, states: Sequence[Any]) -> Any:
        """Return the one that adds."""
        return _Adds(states[0])


class _Adds:
    def __init__(self, total: Any) -> None:
        self._total = total

    def step(self, slots: Any, frames: Any) -> tuple[Any, dict[int, Exception]]:
        self._total[slots] += frames
        return self._total[slots].copy(), {}


def build(name: str, version: str) -> Any:
    """Return a model."""
    match name:
        case "add":
            return PlainAdd()
        case "upper":
            return Upper()
        case "echo":
            return PlainEcho()
        case "repeat":
            return PlainRepeat()
        case "bfloat":
            return BFloat()
        case "broken":
            return Fails()
        case "accumulate":
            return OipStream(RunningSum(), name="accumulate")
        case "versioned":
            return Versioned(version)
        case _:
            return Slow()


class Source:
    """The models by name, as a directory would give them."""

    def names(self) -> list[str]:
        return sorted(CONFIGS)

    async def load(self, name: str) -> list[Any]:
        return [build(name, version) for version in VERSIONS.get(name, ("1",))]


def main() -> int:
    """Serve until SIGTERM."""
    repository = ModelRepository(source=Source())
    repository.configure(lambda name: parsed(SETTINGS[name], is_json=False, what=name) if name in SETTINGS else None)
    app = create_oip_app(
        repository,
        grpc=GrpcConfig(),
        model_control=True,
        logger=make_logger("json", stream=io.StringIO()),
    )

    def announce(address: ServerAddress) -> None:
        grpc = grpc_address_of(app)
        print(json.dumps({"http": f"{address.host}:{address.port}", "grpc": f"{grpc.host}:{grpc.port}"}), flush=True)

    return serve(app, port=0, on_ready=announce)


if __name__ == "__main__":
    sys.exit(main())
