"""Clients of ``mlsys orca chaos``: a server under test, mixed requests, and the tally of what they got."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import psutil
from mlsys_core.errors import ServingError
from rich.progress import Progress, TextColumn, TimeElapsedColumn

_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9},
    {"temperature": 0.7, "n": 2},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0.8, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    {
        "temperature": 0.5,
        "ignore_eos": False,
        "structured_outputs": {
            "json": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
                "required": ["name", "age"],
            }
        },
    },
)
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "abort": signal.SIGABRT}
Verdict = Literal["equal", "lost", "doubled", "different"]
Answer = dict[int, list[str]]  # by choice, the pieces in order: a token's text with its log-probabilities


def verdict_of(expected: Answer, found: Answer) -> Verdict:
    """Return how an answer differs: it misses pieces, has more than there are, or has others.

    Example:
        >>> verdict_of({0: ["a", "b"]}, {0: ["a", "b"]}), verdict_of({0: ["a", "b"]}, {0: ["b"]})
        ('equal', 'lost')
        >>> verdict_of({0: ["a", "b"]}, {0: ["a", "a", "b"]}), verdict_of({0: ["a", "b"]}, {0: ["a", "c"]})
        ('doubled', 'different')
    """
    if expected == found:
        return "equal"
    wanted, had = (
        Counter((index, piece) for index, pieces in each.items() for piece in pieces) for each in (expected, found)
    )
    if had < wanted:
        return "lost"
    return "doubled" if had > wanted else "different"


@dataclass(slots=True)
class Tally:
    """Outcome of a run."""

    num_troubles: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    gaps_s: list[float] = field(default_factory=list)  # between two pieces of an answer
    undisturbed_gaps_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)  # that ended answers, by message
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def num_answers(self) -> int:
        """Answers that were compared."""
        return self.verdicts.total()

    @property
    def num_wrong(self) -> int:
        """Those that are not as without trouble."""
        return self.num_answers - self.verdicts["equal"]

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the lines of the tally: name, value."""
        yield "answers", str(self.num_answers)
        yield "troubles", str(self.num_troubles)
        yield "deaths of workers", f"{self.metrics.get('worker_deaths_total', 0):.0f}"
        yield "equal to the undisturbed run", str(self.verdicts["equal"])
        for name in ("lost", "doubled", "different", "cut"):
            yield f"with tokens {name}" if name != "cut" else "cut short", str(self.verdicts[name])
        for message, number in self.errors.most_common():
            yield f"  {number} times", message
        yield "tokens recomputed", f"{self.metrics.get('recomputed_tokens_total', 0):.0f}"
        yield "longest stall by a death, ms", f"{1e3 * self.metrics.get('longest_stall_seconds', 0):.0f}"
        for name, gaps in (("undisturbed", self.undisturbed_gaps_s), ("troubled", self.gaps_s)):
            ordered = sorted(gaps) or [0.0]
            p99 = ordered[int(0.99 * (len(ordered) - 1))]
            yield f"gaps between tokens, {name}, ms", f"p99 {1e3 * p99:.0f}, longest {1e3 * ordered[-1]:.0f}"


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server under test."""

    process: subprocess.Popen[bytes]
    url: str
    model: str  # its name
    max_model_len: int  # tokens of prompt and answer

    def workers(self) -> list[psutil.Process]:
        """Return its worker processes."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if child.name() == "mlsys-worker"]

    def reload(self) -> bool:
        """Have it load its model anew; return False if it is still at the last time."""
        if len(psutil.Process(self.process.pid).children()) > 1:
            return False
        self.process.send_signal(signal.SIGHUP)
        return True


@contextmanager
def running_server(model: str, num_threads: int, replicas: int = 1) -> Iterator[RunningServer]:
    """Start ``mlsys orca serve`` on a free port and wait until it serves; it ends with the block.

    Raises:
        ServingError: it did not start; the message is the server's own.
    """
    # Bound, and nobody listens: no other program is given the port before the server takes it.
    with socket.socket() as kept, tempfile.TemporaryFile("w+") as log:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        port = kept.getsockname()[1]
        command = [sys.executable, "-m", "mlsys_core", "orca", "serve", model, "--name", "model", "--port", str(port)]
        process = subprocess.Popen([*command, "--threads", str(num_threads), "--replicas", str(replicas)], stderr=log)
        url = f"http://127.0.0.1:{port}"
        try:
            while not _is_up(url):
                if process.poll() is not None:
                    log.seek(0)
                    said = log.read().strip().rpartition("\n")[2].removeprefix("mlsys: error: ")
                    raise ServingError(f"the server did not start: {said or f'exit code {process.returncode}'}")
                time.sleep(0.1)
            (card, *_) = httpx.get(f"{url}/v1/models", timeout=None).json()["data"]
            yield RunningServer(process, url, card["id"], card["max_model_len"])
        finally:
            process.terminate()
            process.wait()


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=None).status_code == 200
    except httpx.TransportError:  # it does not listen yet
        return False


class Chaos:
    """Clients that ask a server the same requests, first undisturbed, then while its workers are troubled.

    Args:
        server: Under test.
        streams: Requests at a time.
        seed: Of the requests and of who is troubled.
    """

    def __init__(self, server: RunningServer, *, streams: int, seed: int) -> None:
        self._server, self._streams = server, streams
        self._rng = random.Random(seed)
        self._bodies = [self._body(number) for number in range(streams)]
        self._tally = Tally()

    async def run(self, *, seconds: float, every_s: float, trouble: str) -> Tally:
        """Make trouble every so many seconds for so long; return what came of it."""
        columns = (TextColumn("{task.description}"), TimeElapsedColumn())
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=None, limits=limits) as client:
            with Progress(*columns, transient=True) as progress:
                progress.add_task("answers without trouble")
                expected = await asyncio.gather(
                    *(self._ask(client, body, self._tally.undisturbed_gaps_s) for body in self._bodies)
                )
                if None in expected:
                    raise ServingError(f"answers fail without trouble: {'; '.join(self._tally.errors) or 'cut short'}")
                progress.add_task(f"{trouble} every {every_s:g} s")
                until_s = time.monotonic() + seconds
                troubles = asyncio.create_task(self._trouble(every_s, _SIGNALS.get(trouble)))
                await asyncio.gather(
                    *(
                        self._again(client, body, answer, until_s)
                        for body, answer in zip(self._bodies, expected, strict=True)
                    )
                )
                troubles.cancel()
            await self._read_metrics(client)
        return self._tally

    async def _again(
        self, client: httpx.AsyncClient, body: dict[str, Any], expected: Answer | None, until_s: float
    ) -> None:
        while time.monotonic() < until_s:
            found = await self._ask(client, body, self._tally.gaps_s)
            self._tally.verdicts["cut" if found is None or expected is None else verdict_of(expected, found)] += 1

    async def _trouble(self, every_s: float, number: signal.Signals | None) -> None:
        """Send workers a signal again and again; None: reload the server."""
        while True:
            await asyncio.sleep(every_s)
            if number is None:
                self._tally.num_troubles += self._server.reload()
                continue
            workers = self._server.workers()
            if workers:
                self._rng.choice(workers).send_signal(number)
                self._tally.num_troubles += 1

    def _body(self, number: int) -> dict[str, Any]:
        subject = self._rng.choice(("cats", "Paris", "trains", "rain", "the number seven"))
        max_tokens = min(self._rng.randint(16, 96), self._server.max_model_len // 4)
        prompt = f"{number}. Some sentences about {subject}. " * self._rng.randint(1, 10)
        return {
            "model": self._server.model,
            "prompt": prompt[: self._server.max_model_len // 2],  # a character is a token at most
            "max_tokens": max_tokens,
            "seed": number,
            "ignore_eos": True,
            "stream": True,
            **_KINDS[number % len(_KINDS)],
        }

    async def _ask(self, client: httpx.AsyncClient, body: dict[str, Any], gaps_s: list[float]) -> Answer | None:
        """Return an answer; None: it was cut short.

        Raises:
            ServingError: the request is refused.
        """
        answer: Answer = {}
        last_s = 0.0
        try:
            async with client.stream("POST", f"{self._server.url}/v1/completions", json=body) as response:
                if response.status_code == 400:
                    raise ServingError(f"the server refuses {body}: {(await response.aread()).decode()}")
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        return answer
                    if not line.startswith("data: "):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        self._tally.errors[event["error"]["message"]] += 1
                    for choice in event.get("choices", ()):
                        piece = json.dumps([choice["text"], choice.get("logprobs"), choice["finish_reason"]])
                        answer.setdefault(choice["index"], []).append(piece)
                    now_s = time.monotonic()
                    if last_s:
                        gaps_s.append(now_s - last_s)
                    last_s = now_s
        except httpx.TransportError:
            return None
        return None

    async def _read_metrics(self, client: httpx.AsyncClient) -> None:
        for line in (await client.get(f"{self._server.url}/metrics")).text.splitlines():
            name, _, rest = line.partition("{")
            if name.startswith("mlsys_orca_") and rest:
                self._tally.metrics[name.removeprefix("mlsys_orca_")] = float(rest.rpartition(" ")[2])
