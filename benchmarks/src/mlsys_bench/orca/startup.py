"""Start-up time of a server: from the command to the first token.

    mlsys bench orca-startup rounds=3

Starts ``mlsys orca serve`` in a process of its own, asks for one token as soon as the port answers, and stops it. On a
machine with other work the processor time shows the cost of starting; the end of the process is part of it.
"""

from __future__ import annotations

import resource
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx

from mlsys_bench.harness.child import free_port
from mlsys_bench.harness.text import rows_section

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section


def start_s(model: str) -> tuple[float, float, float]:
    """Return the seconds from the process's start to ready and to the first token, and of processor time."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    begun, begun_cpu_s = time.perf_counter(), children_cpu_s()
    command = [sys.executable, "-m", "mlsys_core", "orca", "serve", model, "--port", str(port), "--name", "model"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with code {process.returncode}")
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.02)
        ready_s = time.perf_counter() - begun
        body = {"model": "model", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 1}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
        token_s = time.perf_counter() - begun
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    return ready_s, token_s, children_cpu_s() - begun_cpu_s


def children_cpu_s() -> float:
    """Return the processor time of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@dataclass(frozen=True, slots=True)
class Row:
    """One start."""

    ready_s: float
    first_token_s: float
    processor_s: float


def run(context: BenchContext, *, model: str = "smollm2-135m-instruct", rounds: int = 3) -> Section:
    """Start a server of ``model`` so many times."""
    rows = [Row(*start_s(model)) for _ in range(1 if context.is_quick else rounds)]
    text = f"Median: first token after {statistics.median(row.first_token_s for row in rows):.2f} s."
    return rows_section("Orca: start-up", rows, text, model=model)
