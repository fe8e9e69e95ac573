"""Cost of the Open Inference Protocol front: requests a second, p50 and p99, with a model that takes 2 ms a batch.

A server of its own process and keep-alive clients of another; each client sends its next request when it has its
answer. Cases are interleaved in rounds: one batch of 1 at a time or of up to 16 (Triton's dynamic batcher without
delay), tensors as JSON or binary, and gRPC. Each answer is compared with the right one. The front's own work is the
CPU time of the server's processes for one request, which holds on a shared machine too.

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

from mlsys_bench.harness.text import rows_section

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

MODEL_S = 0.002
WIDTH = 4


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

    def go_on(self) -> None:
        """Prepare to be measured: a server that someone else has started runs already."""

    def pause(self) -> None:
        """Wait while others are measured."""


def serve() -> None:
    """Run the server and print its addresses."""
    import io

    from mlsys_core.serving import ServeRequest, ServingLoop, ThreadExecutor, WallClock
    from mlsys_core.serving.baselines import ZeroBatch
    from mlsys_core.serving.http import HttpConfig, ServerAddress
    from mlsys_core.serving.http import serve as serve_http
    from mlsys_core.serving.http.logs import make_logger
    from mlsys_core.serving.oip import (
        DataType,
        Executions,
        GrpcConfig,
        InferRequest,
        InferResponse,
        LoopClient,
        ModelRepository,
        ModelSpec,
        TensorSpec,
        create_oip_app,
        grpc_address_of,
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


def http_request(model: str, wire: str, x: Any) -> bytes:
    """Return the bytes of one request."""
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": list(x.shape)}
    headers = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\n"
    if wire == "binary":
        tensor["parameters"] = {"binary_data_size": x.nbytes}
        body = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        headers += f"Inference-Header-Content-Length: {len(body)}\r\n"
        body += x.tobytes()
    else:
        body = json.dumps({"inputs": [tensor | {"data": x.ravel().tolist()}]}).encode()
    return f"{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


def check_http(response: bytes, wire: str, x: Any) -> None:
    """Fail if ``response`` is not the answer to ``x``."""
    head, _, body = response.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"a request failed: {response[:500]!r}")
    if wire == "binary":
        y: Any = np.frombuffer(body[-x.nbytes :], np.float32)
    else:
        found = json.loads(body)
        y = (found if isinstance(found, list) else found["outputs"])[0]["data"]  # BentoML's answers are lists
    if np.any(np.asarray(y) != 2 * x.ravel()):
        raise SystemExit(f"a wrong answer to {x}: {y}")


def joined(chunks: bytearray) -> bytes:
    """Return the body of a chunked answer: after each line with a length, that many bytes."""
    body, at = b"", chunks.index(b"\r\n\r\n") + 4
    while (end := chunks.index(b"\r\n", at)) and (length := int(chunks[at:end], 16)):
        body += chunks[end + 2 : end + 2 + length]
        at = end + 4 + length
    return body


class HttpClient(asyncio.Protocol):
    """One keep-alive connection: as thin as Python allows, so that the server dominates the time."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._answer: asyncio.Future[bytes] | None = None  # of the request under way
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        """Keep the transport of the new connection."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Wake the waiting caller when the answer is whole."""
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end]).lower()
        _, has_length, rest = head.partition(b"\r\ncontent-length:")
        if has_length:
            is_whole = len(self._buffer) >= end + 4 + int(rest.split(b"\r\n")[0])
        else:  # in chunks, the last of which is empty
            is_whole = self._buffer.endswith(b"\r\n0\r\n\r\n")
        if is_whole and self._answer is not None:
            waiting, self._answer = self._answer, None
            answer = bytes(self._buffer) if has_length else bytes(self._buffer[: end + 4]) + joined(self._buffer[end:])
            self._buffer.clear()
            waiting.set_result(answer)

    def close(self) -> None:
        """Close the connection: a server holds as many as it is told to."""
        self._transport.close()

    async def ask(self, request: bytes) -> bytes:
        """Return the answer, headers and body."""
        self._answer = answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        response: bytes = await answer
        return response


async def http_clients(address: str, model: str, wire: str, num_clients: int, seconds: float) -> list[float]:
    """Return the latencies, in seconds, of all requests that began within ``seconds``."""
    host, _, port = address.partition(":")
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        x = np.arange(WIDTH, dtype=np.float32)[None] + number
        request = http_request(model, wire, x)
        _, connection = await loop.create_connection(HttpClient, host, int(port))
        while (started_s := time.perf_counter()) < end:
            response = await connection.ask(request)
            latencies.append(time.perf_counter() - started_s)
            check_http(response, wire, x)
        connection.close()
        await asyncio.sleep(0)  # it closes on the loop's next turn

    await asyncio.gather(*(client(number) for number in range(num_clients)))
    return latencies


async def grpc_clients(address: str, model: str, num_clients: int, seconds: float) -> list[float]:
    """Return the latencies of gRPC clients, like :func:`http_clients`."""
    import grpc.aio
    from mlsys_core.serving.oip.grpc.schema import SERVICE, messages

    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        x = np.arange(WIDTH, dtype=np.float32)[None] + number
        request = messages().ModelInferRequest(model_name=model)
        request.inputs.add(name="x", datatype="FP32", shape=x.shape)
        request.raw_input_contents.append(x.tobytes())
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection for each client
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            infer = channel.unary_unary(
                f"/{SERVICE}/ModelInfer",
                request_serializer=messages().ModelInferRequest.SerializeToString,
                response_deserializer=messages().ModelInferResponse.FromString,
            )
            while (started_s := time.perf_counter()) < end:
                response = await infer(request)
                latencies.append(time.perf_counter() - started_s)
                if np.any(np.frombuffer(response.raw_output_contents[0], np.float32) != 2 * x.ravel()):
                    raise SystemExit(f"a wrong answer to {x}")

    await asyncio.gather(*(client(number) for number in range(num_clients)))
    return latencies


def measure(servers: list[Server], *, seconds: float, num_rounds: int, num_clients: int) -> list[Row]:
    """Measure all cases, interleaved."""
    cases = [
        (server, model, wire)
        for model in ("unbatched", "batched")
        for wire in ("binary", "json", "grpc")
        for server in servers
        if wire == "json" or server.grpc != "-"
    ]
    latencies: list[list[float]] = [[] for _ in cases]
    rates: list[list[float]] = [[] for _ in cases]
    cpu_s = [0.0 for _ in cases]
    for number in range(num_rounds + 1):
        for place, (server, model, wire) in enumerate(cases):
            server.go_on()
            before_s, started_s = server.cpu_s(), time.perf_counter()
            length_s = seconds if number else min(1.0, seconds)
            if wire == "grpc":
                found = asyncio.run(grpc_clients(server.grpc, model, num_clients, length_s))
            else:
                found = asyncio.run(http_clients(server.http, model, wire, num_clients, length_s))
            server.pause()
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
