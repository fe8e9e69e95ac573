"""Start-up time of a server: from the command to the first token.

    python benchmarks/orca/startup.py --repetitions 3

Starts ``mlsys orca serve`` in a process of its own, asks for one token as soon as the port answers, and stops it. On a
machine with other work the processor time shows the cost of starting; the end of the process is part of it.
"""

from __future__ import annotations

import argparse
import resource
import signal
import socket
import statistics
import subprocess
import sys
import time

import httpx


def start_s(model: str) -> tuple[float, float, float]:
    """Return the seconds from the process's start to ready and to the first token, and of processor time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    begun, begun_cpu_s = time.perf_counter(), children_cpu_s()
    command = [sys.executable, "-m", "mlsys_core", "orca", "serve", model, "--port", str(port), "--name", "model"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit(f"the server ended with code {process.returncode}")
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a name from 'mlsys models list', or a path")
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    runs = [start_s(arguments.model) for _ in range(arguments.repetitions)]
    for number, (ready_s, token_s, cpu_s) in enumerate(runs, 1):
        print(
            f"run {number}: ready after {ready_s:.2f} s, first token after {token_s:.2f} s, {cpu_s:.2f} s of processor"
        )
    print(f"median: first token after {statistics.median(token_s for _, token_s, _ in runs):.2f} s")


if __name__ == "__main__":
    main()
