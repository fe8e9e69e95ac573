"""Cost of the Open Inference Protocol front: requests a second, p50 and p99, with a model that takes 2 ms a batch.

A server of its own process and keep-alive clients of another; each client sends its next request when it has its
answer. Cases are interleaved in rounds: one batch of 1 at a time or of up to 16 (Triton's dynamic batcher without
delay), tensors as JSON or binary, gRPC calls, and one gRPC stream for each client. Each answer is compared with the
right one. The front's own work is the CPU time of the server's processes for one request, which holds on a shared
machine too.

    mlsys bench core-oip-front seconds=5 rounds=5

Against real Triton, in the same rounds (benchmarks/peers/pytriton/server.py has the same models and the same 2 ms):

    .peers/pytriton/bin/python benchmarks/peers/pytriton/server.py 18000 18001 &
    mlsys bench core-oip-front clients=8,64,256 peers=pytriton@127.0.0.1:18000@127.0.0.1:18001@$!

benchmarks/peers/pytriton/direct.py is Triton without PyTriton between, which is quicker.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from mlsys_bench.core.oip_clients import WIDTH, grpc_clients, http_clients
from mlsys_bench.harness.text import rows_section

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

MODEL_S = 0.002
WIRES = ("binary", "json", "grpc", "stream")


@dataclass(frozen=True, slots=True)
class Row:
    """One case, over all rounds."""

    server: str
    model: str
    wire: str
    clients: int  # connections
    requests_per_s: float  # median of the rounds
    p50_ms: float
    p99_ms: float
    server_cpu_us: float  # of the server's processes, for one request


@dataclass(frozen=True, slots=True)
class Server:
    """A server under measurement."""

    name: str
    http: str  # host:port
    grpc: str
    pid: int

    def cpu_s(self) -> float:
        """Return the CPU seconds used by its process and all below it."""
        process = psutil.Process(self.pid)
        return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


def serve() -> None:
    """Run the server and print its addresses."""
    import io

    from mlsys_core.loop import ServeRequest, ServingLoop, ThreadExecutor, WallClock
    from mlsys_core.loop.baselines import ZeroBatch
    from mlsys_open_inference import GrpcConfig, create_oip_app, grpc_address_of
    from mlsys_serving.http import HttpConfig, ServerAddress
    from mlsys_serving.http import serve as serve_http
    from mlsys_serving.http.logs import make_logger
    from mlsys_serving.models import (
        DataType,
        Executions,
        InferRequest,
        InferResponse,
        LoopClient,
        ModelRepository,
        ModelSpec,
        TensorSpec,
    )

    class Doubler:
        """Doubles its input, in a serving loop, 2 ms a batch."""

        def __init__(self, name: str, max_batch_size: int) -> None:
            row = (-1, WIDTH)
            self.spec = ModelSpec(
                name=name,
                inputs=(TensorSpec("x", DataType.FP32, row),),
                outputs=(TensorSpec("y", DataType.FP32, row),),
                max_batch_size=16,
            )
            self.executions = Executions()
            self._client: LoopClient[Any, Any, Any] = LoopClient()
            self._loop: ServingLoop[Any, Any, Any] = ServingLoop(
                ZeroBatch(max_batch_size=max_batch_size), ThreadExecutor(self._run), WallClock(), listener=self._client
            ).start()

        def _run(self, batch: Any) -> Sequence[Any]:
            started_s = time.perf_counter()
            time.sleep(MODEL_S)
            outputs = np.concatenate([request.payload for request in batch.requests]) * np.float32(2)
            sizes = np.cumsum([len(request.payload) for request in batch.requests])[:-1]
            self.executions.record(len(outputs), compute_infer_s=time.perf_counter() - started_s)
            return np.split(outputs, sizes)

        async def infer(self, request: InferRequest) -> InferResponse:
            output = await self._client.submit(self._loop, ServeRequest(request.key, request.inputs["x"]), request.key)
            return InferResponse({"y": output})

        async def close(self) -> None:
            await asyncio.to_thread(self._loop.stop)

    app = create_oip_app(
        ModelRepository([Doubler("unbatched", 1), Doubler("batched", 16)]),
        config=HttpConfig(),
        grpc=GrpcConfig(),
        logger=make_logger("json", stream=io.StringIO()) if "--quiet" in sys.argv else None,
    )

    def announce(address: ServerAddress) -> None:
        grpc = grpc_address_of(app)
        print(json.dumps({"http": f"{address.host}:{address.port}", "grpc": f"{grpc.host}:{grpc.port}"}), flush=True)

    sys.exit(serve_http(app, port=0, on_ready=announce))


def measure(servers: list[Server], *, seconds: float, num_rounds: int, num_clients: int) -> list[Row]:
    """Measure all cases, interleaved."""
    cases = [
        (server, model, wire)
        for model in ("unbatched", "batched")
        for wire in WIRES
        for server in servers
        if wire == "json" or server.grpc != "-"
    ]
    latencies: list[list[float]] = [[] for _ in cases]
    rates: list[list[float]] = [[] for _ in cases]
    cpu_s = [0.0 for _ in cases]
    for number in range(num_rounds + 1):
        for place, (server, model, wire) in enumerate(cases):
            before_s, started_s = server.cpu_s(), time.perf_counter()
            length_s = seconds if number else min(1.0, seconds)
            if wire in ("grpc", "stream"):
                is_stream = wire == "stream"
                found = asyncio.run(grpc_clients(server.grpc, model, num_clients, length_s, is_stream=is_stream))
            else:
                found = asyncio.run(http_clients(server.http, model, wire, num_clients, length_s))
            if number:  # the first round warms up
                latencies[place] += found
                rates[place].append(len(found) / (time.perf_counter() - started_s))
                cpu_s[place] += server.cpu_s() - before_s
    return [
        Row(
            server=server.name,
            model=model,
            wire=wire,
            clients=num_clients,
            requests_per_s=statistics.median(rates[place]),
            p50_ms=float(np.percentile(latencies[place], 50)) * 1e3,
            p99_ms=float(np.percentile(latencies[place], 99)) * 1e3,
            server_cpu_us=cpu_s[place] / len(latencies[place]) * 1e6,
        )
        for place, (server, model, wire) in enumerate(cases)
    ]


def run(
    context: BenchContext,
    *,
    seconds: float = 3.0,
    rounds: int = 3,
    clients: tuple[int, ...] = (16,),
    peers: tuple[str, ...] = (),
    quiet: bool = False,
) -> Section:
    """Measure our server, and peers that run already.

    Args:
        context: The suite's context.
        seconds: Of each case in each round.
        rounds: Rounds that are timed; one more warms up.
        clients: Connections at once; each number is measured in turn.
        peers: Each ``NAME@HTTP@GRPC@PID``; GRPC is - for a server that speaks only JSON.
        quiet: Our server logs no requests.
    """
    if context.is_quick:
        seconds, rounds = 0.2, 1
    others = [Server(name, http, grpc, int(pid)) for name, http, grpc, pid in (peer.split("@") for peer in peers)]
    command = [sys.executable, "-m", __name__, *(["--quiet"] if quiet else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            urls = json.loads(process.stdout.readline())
            ours = Server("mlsys", urls["http"], urls["grpc"], process.pid)
            rows = [
                row
                for count in clients
                for row in measure([ours, *others], seconds=seconds, num_rounds=rounds, num_clients=count)
            ]
        finally:
            process.terminate()
    counts = " / ".join(map(str, clients))
    text = f"{counts} clients, [1, {WIDTH}] FP32, {rounds} rounds of {seconds:g} s; server us: of CPU time a request."
    return rows_section("Core: the Open Inference Protocol's front", rows, text)


if __name__ == "__main__":
    serve()
