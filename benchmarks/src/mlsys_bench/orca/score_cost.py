"""Cost of showing a server live: 64 streams with a page that looks on, and without, in turn.

    mlsys bench score-cost turns=8 tokens=64

One server of the default kind (processes, native kernels) answers the same 64 greedy requests in every turn. In every
second turn a process of its own reads ``/ui/score/events`` as a page does. Answers must be equal. Shown are tokens a
second, and the processor time of all the server's processes, which other programs disturb less.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlsys_core.errors import InvalidInputError, ServingError

from mlsys_bench.harness.text import rows_section

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

_NAME = "shown"  # of the model, for clients
_START_S = 180.0
_REST_S = 6.0  # watching goes on for five seconds after the last page has left
# A page: reads all that comes, and says how many columns there were.
_VIEWER = """
import json, sys, httpx
columns = 0
try:
    with httpx.stream("GET", sys.argv[1] + "/ui/score/events", timeout=None) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                columns += len(json.loads(line[6:])["columns"])
                print(columns, flush=True)
except httpx.HTTPError:
    pass
"""


@dataclass(frozen=True, slots=True)
class Row:
    """Turns of one kind."""

    shown: str
    turns: int
    tokens_per_s: float  # median
    spread: float  # of tokens a second: largest over smallest
    cpu_ms_per_token: float  # median, of all the server's processes
    columns: int  # that the page got, in all turns


@dataclass(frozen=True, slots=True)
class _Turn:
    wall_s: float
    cpu_s: float
    columns: int
    texts: tuple[str, ...]


def run(
    context: BenchContext,
    *,
    model: str = "smollm2-135m-instruct",
    streams: int = 64,
    tokens: int = 64,
    turns: int = 6,
) -> Section:
    """Measure both.

    Args:
        context: The suite's context; quick has 8 streams of 8 tokens and one turn of each kind.
        model: A name or a path.
        streams: Requests at a time.
        tokens: Of each answer.
        turns: Of each kind.

    Raises:
        InvalidInputError: a number is below 1.
        ServingError: the server does not start, answers differ, or a page got no column.
    """
    if context.is_quick:
        streams, tokens, turns = 8, 8, 1
    if min(streams, tokens, turns) < 1:
        raise InvalidInputError("streams, tokens and turns are numbers of at least 1")
    found: dict[str, list[_Turn]] = {"nobody": [], "one page": []}
    with _server(model, streams) as (url, process):
        expected = _turn(url, process, streams, tokens, is_shown=False).texts  # and the kernels are warm
        for number in range(turns):
            names = list(found) if number % 2 == 0 else list(reversed(found))
            for name in names:
                time.sleep(_REST_S)
                turn = _turn(url, process, streams, tokens, is_shown=name == "one page")
                if turn.texts != expected:
                    raise ServingError(
                        f"answers shown to {name} differ from the first turn's: figures would mean nothing"
                    )
                if (turn.columns > 0) != (name == "one page"):
                    raise ServingError(f"{turn.columns} columns were shown to {name}")
                found[name].append(turn)
                context.console.print(
                    f"{name}: {streams * tokens / turn.wall_s:.1f} tokens/s, {turn.cpu_s:.2f} s of cores"
                )
    rows = [_row(name, each, streams * tokens) for name, each in found.items()]
    nobody, page = rows
    return rows_section(
        "Orca: cost of the score",
        rows,
        model=model,
        streams=streams,
        tokens=tokens,
        throughput_ratio=page.tokens_per_s / nobody.tokens_per_s,
        cpu_ratio=page.cpu_ms_per_token / nobody.cpu_ms_per_token,
    )


def _row(name: str, turns: list[_Turn], num_tokens: int) -> Row:
    rates = [num_tokens / turn.wall_s for turn in turns]
    return Row(
        shown=name,
        turns=len(turns),
        tokens_per_s=statistics.median(rates),
        spread=max(rates) / min(rates),
        cpu_ms_per_token=1000 * statistics.median(turn.cpu_s for turn in turns) / num_tokens,
        columns=sum(turn.columns for turn in turns),
    )


def _turn(url: str, process: subprocess.Popen[bytes], streams: int, tokens: int, *, is_shown: bool) -> _Turn:
    import httpx

    prompts = [[1000 + 50 * number + index for index in range(24)] for number in range(streams)]
    body = {"model": _NAME, "prompt": prompts, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    with _viewer(url, is_shown=is_shown) as viewer:
        cpu_s, begun_s = _cpu_s(process), time.perf_counter()
        answer = httpx.post(url + "/v1/completions", json=body, timeout=600)
        wall_s, cpu_s = time.perf_counter() - begun_s, _cpu_s(process) - cpu_s
        answer.raise_for_status()
    texts = tuple(choice["text"] for choice in answer.json()["choices"])
    return _Turn(wall_s, cpu_s, viewer["columns"], texts)


def _cpu_s(process: subprocess.Popen[bytes]) -> float:
    """Return the processor time of the server's processes so far, in seconds."""
    import psutil

    own = psutil.Process(process.pid)
    times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


@contextmanager
def _viewer(url: str, *, is_shown: bool) -> Iterator[dict[str, int]]:
    found = {"columns": 0}
    if not is_shown:
        yield found
        return
    reader = subprocess.Popen([sys.executable, "-c", _VIEWER, url], stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    reader.stdout.readline()  # it has its snapshot
    try:
        yield found
        time.sleep(0.5)  # for the last delta
    finally:
        reader.terminate()
        lines = reader.stdout.read().split()
        reader.wait()
        found["columns"] = int(lines[-1]) if lines else 0


@contextmanager
def _server(model: str, streams: int) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    import httpx

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words: list[Any] = ["orca", "serve", model, "--port", port, "--max-batch-size", streams, "--max-model-len", 256]
    words += ["--name", _NAME]
    command = [sys.executable, "-m", "mlsys_core", *map(str, words), "--log-level", "warning"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    url, until_s = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
    try:
        while True:
            try:
                if httpx.get(url + "/health/ready", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            if process.poll() is not None or time.monotonic() > until_s:
                raise ServingError(f"no server of {model!r} answers; try it: mlsys orca serve {model}")
            time.sleep(0.1)
        yield url, process
    finally:
        process.terminate()
        process.wait(60)
