"""Cost and gain of instances in processes: one process, one instance and two, with the same model, cores and clients.

Servers of ``mlsys dvabatch serve`` run side by side and are loaded in turn, in rounds. Texts are small and cost
compute; images are large and cost copies. The processor time of the front (that of the whole server, where there is
one process) and of the workers is counted apart. Each answer is compared with the first server's.

    mlsys bench core-instances seconds=5 rounds=5
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import psutil
from mlsys_serving.instances.chaos import running_server

from mlsys_bench.core.oip_clients import HttpClient
from mlsys_bench.harness.text import rows_section

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

_TOLERANCE = 1e-3  # relative to the largest number: other batches round otherwise
_NUM_REQUESTS = 16  # different ones


@dataclass(frozen=True, slots=True)
class Row:
    """One server with one model, over all rounds."""

    model: str
    server: str
    requests_per_s: float  # median of the rounds
    p50_ms: float
    p99_ms: float
    front_cpu_us: float  # for a request; of the only process, where there is one
    workers_cpu_us: float


@dataclass(slots=True)
class _Server:
    name: str
    url: str
    root: psutil.Process

    def cpu_s(self) -> tuple[float, float]:
        """Return the processor seconds of the front, and of the workers."""
        front = workers = 0.0
        for process in (self.root, *self.root.children(recursive=True)):
            seconds = sum(process.cpu_times()[:2])
            if process.name() == "mlsys-worker":
                workers += seconds
            else:
                front += seconds
        return front, workers


def _requests(metadata: dict[str, Any], host: str) -> list[bytes]:
    """Return requests of binary tensors for a model, ready for the socket."""
    rng = np.random.default_rng(0)
    [*names] = (each["name"] for each in metadata["inputs"])
    made = []
    for _ in range(_NUM_REQUESTS):
        if "input_ids" in names:
            value: Any = rng.integers(1000, 20000, (1, int(rng.integers(4, 40))))
            spec = next(each for each in metadata["inputs"] if each["name"] == "input_ids")
        else:
            [spec] = metadata["inputs"]
            value = rng.standard_normal((1, *spec["shape"][1:]), np.float32)
        tensor = {
            "name": spec["name"],
            "datatype": spec["datatype"],
            "shape": list(value.shape),
            "parameters": {"binary_data_size": value.nbytes},
        }
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        lengths = f"Inference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(head) + value.nbytes}\r\n\r\n"
        made.append(
            f"POST /v2/models/{metadata['name']}/infer HTTP/1.1\r\nHost: {host}\r\n{lengths}".encode()
            + head
            + value.tobytes()
        )
    return made


def _numbers(response: bytes) -> Any:
    """Return the first output of a response. Ends the run if the request failed."""
    head, _, body = response.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"a request failed: {response[:500]!r}")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    length = int(fields[b"inference-header-content-length"])
    nbytes = json.loads(body[:length])["outputs"][0]["parameters"]["binary_data_size"]
    return np.frombuffer(body[length : length + nbytes], np.float32)


def _require_same(found: Any, expected: Any, server: str) -> None:
    scale = float(np.abs(expected).max()) or 1.0
    if found.shape != expected.shape or float(np.abs(found - expected).max()) > _TOLERANCE * scale:
        raise SystemExit(f"server {server!r} gives another answer than the first")


async def _load(
    server: _Server, requests: list[bytes], expected: list[Any], num_clients: int, seconds: float
) -> list[float]:
    """Return the latencies, in seconds, of clients that ask one request after the other."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    loop, latencies = asyncio.get_running_loop(), list[float]()
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        transport, connection = await loop.create_connection(HttpClient, host, int(port))
        while (started_s := time.perf_counter()) < end:
            number = (number + 1) % len(requests)
            response = await connection.ask(requests[number])
            latencies.append(time.perf_counter() - started_s)
            _require_same(_numbers(response), expected[number], server.name)
        transport.close()

    await asyncio.gather(*(client(number) for number in range(num_clients)))
    return latencies


async def _answers(server: _Server, requests: list[bytes]) -> list[Any]:
    host, _, port = server.url.removeprefix("http://").partition(":")
    transport, connection = await asyncio.get_running_loop().create_connection(HttpClient, host, int(port))
    found = [_numbers(await connection.ask(request)) for request in requests]
    transport.close()
    return found


def run(
    context: BenchContext,
    *,
    seconds: float = 3.0,
    rounds: int = 5,
    clients: int = 16,
    models: tuple[str, ...] = ("all-minilm-l6-v2", "linknet"),
) -> Section:
    """Measure models of DVABatch in one process, one instance and two.

    Args:
        context: The suite's context.
        seconds: Of each case in each round.
        rounds: Rounds that are timed; one more warms up.
        clients: Connections at once.
        models: As ``mlsys dvabatch serve`` takes them.
    """
    if context.is_quick:
        seconds, rounds = 0.3, 1
    rows: list[Row] = []
    for model in models:
        with ExitStack() as stack:
            servers = []
            for name, more in (("one process", []), ("1 instance", ["1"]), ("2 instances", ["2"])):
                options = ["--instances", *more] if more else []
                url, root = stack.enter_context(running_server(["dvabatch", "serve", model, *options]))
                servers.append(_Server(name, url, root))
            rows += _measured(model, servers, seconds=seconds, num_rounds=rounds, num_clients=clients)
    return rows_section(
        "Core: instances in processes", rows, f"{clients} clients, {rounds} rounds of {seconds:g} s, in turn; binary."
    )


def _measured(model: str, servers: list[_Server], *, seconds: float, num_rounds: int, num_clients: int) -> list[Row]:
    metadata = httpx.get(f"{servers[0].url}/v2/models/{model}").json()
    requests = _requests(metadata, "localhost")
    expected = asyncio.run(_answers(servers[0], requests))
    latencies: list[list[float]] = [[] for _ in servers]
    rates: list[list[float]] = [[] for _ in servers]
    front_s, workers_s = [0.0] * len(servers), [0.0] * len(servers)
    for number in range(num_rounds + 1):
        for place, server in enumerate(servers):
            before, started_s = server.cpu_s(), time.perf_counter()
            found = asyncio.run(
                _load(server, requests, expected, num_clients, seconds if number else min(1.0, seconds))
            )
            if number:  # the first round warms up
                after = server.cpu_s()
                latencies[place] += found
                rates[place].append(len(found) / (time.perf_counter() - started_s))
                front_s[place] += after[0] - before[0]
                workers_s[place] += after[1] - before[1]
    return [
        Row(
            model=model,
            server=server.name,
            requests_per_s=statistics.median(rates[place]),
            p50_ms=float(np.percentile(latencies[place], 50)) * 1e3,
            p99_ms=float(np.percentile(latencies[place], 99)) * 1e3,
            front_cpu_us=front_s[place] / len(latencies[place]) * 1e6,
            workers_cpu_us=workers_s[place] / len(latencies[place]) * 1e6,
        )
        for place, server in enumerate(servers)
    ]
