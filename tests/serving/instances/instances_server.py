"""A server of two tiny models in processes, for the tests: run as a script with the number of instances."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
from mlsys_open_inference import GrpcConfig, create_oip_app
from mlsys_serving.http import BoundPort
from mlsys_serving.http.sockets import bind
from mlsys_serving.instances import InstanceGroup, serve_instances
from mlsys_serving.models import (
    DataType,
    Executions,
    InferRequest,
    InferResponse,
    ModelRepository,
    ModelSpec,
    TensorSpec,
)
from mlsys_serving.models.app import DEFAULT_CONFIG

POISON, BROKEN = -1.0, -2.0  # first numbers of inputs: the process crashes, the model raises


def spec_of(name: str) -> ModelSpec:
    """Return the spec: numbers and a text in, both doubled and the worker's process id out."""
    numbers, text = (TensorSpec("x", DataType.FP32, (-1,)), TensorSpec("text", DataType.BYTES, (1,)))
    return ModelSpec(
        name=name,
        inputs=(
            numbers,
            TensorSpec("seconds", DataType.FP32, (1,), optional=True),
            TensorSpec("gate", DataType.BYTES, (1,), optional=True),
            text,
        ),
        outputs=(numbers, text, TensorSpec("pid", DataType.INT64, (1,))),
    )


async def opened(request: InferRequest) -> None:
    """Wait for the file that a request names."""
    gate = Path(bytes(request.inputs.get("gate", [b"/"])[0]).decode())
    while not gate.exists():
        await asyncio.sleep(0.01)


class Doubling:
    """Doubles what it gets, after a while, and when the file that it is given as a gate is there."""

    def __init__(self, name: str) -> None:
        self.spec, self.executions = spec_of(name), Executions()

    async def infer(self, request: InferRequest) -> InferResponse:
        """Return the doubled inputs."""
        x = request.inputs["x"]
        await asyncio.sleep(float(request.inputs.get("seconds", [0.002])[0]))
        await opened(request)
        if x.size and x[0] == POISON:
            ctypes.string_at(0)
        if x.size and x[0] == BROKEN:
            raise KeyError("secret")
        self.executions.record(1)
        text = np.array([request.inputs["text"][0] * 2], np.object_)
        return InferResponse({"x": x * 2, "text": text, "pid": np.array([os.getpid()])}, parameters={"parts": 1})

    async def stream(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Yield one number after the other, doubled."""
        for place, value in enumerate(request.inputs["x"]):
            if place == 2:
                await opened(request)
            yield InferResponse({"x": np.array([2 * value], np.float32)})

    async def close(self) -> None:
        """Free nothing."""


def main() -> int:
    """Serve until a signal."""
    logging.basicConfig()
    groups = [
        InstanceGroup(spec=spec_of(name), build=lambda _, name=name: Doubling(name), is_streaming=True)
        for name in ("first", "second")
    ]

    held, grpc = bind("127.0.0.1", 0)

    def make_app(repository: ModelRepository):
        return create_oip_app(repository, config=DEFAULT_CONFIG, grpc=GrpcConfig(port=grpc.port))

    with held, BoundPort("127.0.0.1", 0, config=DEFAULT_CONFIG) as bound:
        return serve_instances(
            groups,
            int(sys.argv[1]),
            make_app,
            bound=bound,
            on_ready=lambda address: print(address.url, grpc.port, flush=True),
            part_nbytes=4 << 20,
        )


if __name__ == "__main__":
    sys.exit(main())
