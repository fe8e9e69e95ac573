"""Cost of the Open Inference Protocol front: requests a second, p50 and p99, with a model that takes 2 ms a batch.

DVABatch's server (:mod:`mlsys_bench.dvabatch.server`), and keep-alive clients of another process; each client sends its
next request when it has its answer. Cases are interleaved in rounds: one batch of 1 at a time or of up to 16 (Triton's
dynamic batcher without delay), tensors as JSON or binary, gRPC calls, and one gRPC stream for each client. Each answer
is compared with the right one. The front's own work is the CPU time of the server's processes for one request, which
holds on a shared machine too.

    mlsys bench core-oip-front seconds=5 rounds=5

Against real Triton, in the same rounds (benchmarks/peers/pytriton/server.py has the same models and the same 2 ms):

    .peers/pytriton/bin/python benchmarks/peers/pytriton/server.py 18000 18001 &
    mlsys bench core-oip-front clients=8,64,256 peers=triton@127.0.0.1:18000@127.0.0.1:18001@$!

benchmarks/peers/pytriton/direct.py is Triton without PyTriton between, which is quicker.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import psutil

from mlsys_bench.core.oip_clients import WIDTH, grpc_clients, http_clients
from mlsys_bench.harness.child import free_port
from mlsys_bench.harness.text import rows_section

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

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
) -> Section:
    """Measure our server, and peers that run already.

    Args:
        context: The suite's context.
        seconds: Of each case in each round.
        rounds: Rounds that are timed; one more warms up.
        clients: Connections at once; each number is measured in turn.
        peers: Each ``NAME@HTTP@GRPC@PID``; GRPC is - for a server that speaks only JSON.
    """
    if context.is_quick:
        seconds, rounds = 0.2, 1
    others = [Server(name, http, grpc, int(pid)) for name, http, grpc, pid in (peer.split("@") for peer in peers)]
    http, grpc = free_port(), free_port()
    command = [sys.executable, "-m", "mlsys_bench.dvabatch.server", str(http), str(grpc)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()  # it is ready
            ours = Server("dvabatch", f"127.0.0.1:{http}", f"127.0.0.1:{grpc}", process.pid)
            rows = [
                row
                for count in clients
                for row in measure([ours, *others], seconds=seconds, num_rounds=rounds, num_clients=count)
            ]
        finally:
            process.terminate()
    counts = " / ".join(map(str, clients))
    text = f"{counts} clients, [1, {WIDTH}] FP32, {rounds} rounds of {seconds:g} s; server us: of CPU time a request."
    return rows_section("The Open Inference Protocol's front", rows, text)
