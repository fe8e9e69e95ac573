"""Servers of several processes under test, and clients that ask them."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from tests.processes import by_age, until
from tests.warm import Started

_MAX_TIMES = 400  # that a client comes back to a stream
Event = tuple[str, str]  # of a stream: its id, and the rest of it
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@dataclass
class Server:
    """A server under test."""

    process: subprocess.Popen[str] | Started
    port: int
    host: str = "127.0.0.1"

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def workers(self) -> list[psutil.Process]:
        """Return its workers, the one that serves first."""
        children = psutil.Process(self.process.pid).children()
        return sorted((child for child in children if name_of(child) == "mlsys-worker"), key=by_age)

    def kill_worker(self, chance: random.Random | None = None) -> list[int]:
        """Kill the worker that serves first, or one by chance; return its id, or nothing if none runs now."""
        running = self.workers()
        hit = running[:1] if chance is None else chance.sample(running, min(1, len(running)))
        for worker in hit:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        return [worker.pid for worker in hit]

    def metric(self, name: str) -> float:
        """Return a value of ``/metrics``, by its name behind the prefix."""
        lines = httpx.get(f"{self.url}/metrics", timeout=None).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"mlsys_orca_{name}{{"))

    def await_metric(self, name: str, least: float) -> None:
        """Wait until a value of ``/metrics`` is ``least`` or more: an answer may be there before it is counted."""
        until(lambda: self.metric(name) >= least)


MOST_KILLS = 3  # at a fourth without a token in between a request is given up, as it should be


def killer(server: Server, chance: random.Random | None = None) -> Callable[[], int]:
    """Return a trouble for one call of :func:`answers`: kills workers, not so many that a request is given up."""
    killed: list[int] = []

    def kill() -> int:
        if len(killed) < MOST_KILLS:
            killed.extend(server.kill_worker(chance))
        return len(killed)

    return kill


def name_of(process: psutil.Process) -> str:
    """Return a process's name; empty: it is gone."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


_CALL_ID = re.compile(r"call_[0-9a-f]{24}")


def bodies(number: int) -> list[dict[str, Any]]:
    """Return requests of every kind."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.9, "n": 2},
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1, "stream": False},
        {"temperature": 1.0, "structured_outputs": {"json": SCHEMA}, "ignore_eos": False},
        {"temperature": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    ]
    rng = random.Random(0)
    return [
        {
            "model": "tiny",
            "prompt": "".join(rng.choice("abdefgh ") for _ in range(rng.randint(1, 40))),
            "max_tokens": rng.randint(4, 40),
            "seed": index,
            "ignore_eos": True,
            "stream": True,
            **kinds[index % len(kinds)],
        }
        for index in range(number)
    ]


def calls(number: int) -> list[dict[str, Any]]:
    """Return requests that must be answered by a call of a function; the server has ``template=CALLS``."""
    function = {"name": "f", "parameters": SCHEMA}
    return [
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "abc"[: 1 + index % 3]}],
            "max_tokens": 60,
            "seed": index,
            "temperature": 1.0,
            "stream": True,
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
        }
        for index in range(number)
    ]


async def answer(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], on_event: Callable[[], None] = lambda: None
) -> list[Any]:
    """Return all events of a stream but for ids and times, in order; choices one after the other.

    ``on_event`` is called at each event, before the next is read.
    """
    events: list[Any] = []
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    if not body["stream"]:
        whole = (await client.post(url + path, json=body)).json()
        return [whole["choices"], whole["usage"]]
    async with client.stream("POST", url + path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        is_done = False
        async for line in response.aiter_lines():
            is_done = is_done or line == "data: [DONE]"
            if line.startswith("data: ") and not is_done:
                event = json.loads(_CALL_ID.sub("call_", line[6:]))
                events += event.get("choices", [event])
                on_event()
    assert is_done or "error" in events[-1], "the stream was cut"
    return sorted(events, key=lambda event: event.get("index", 0))


async def answers(url: str, asked: list[dict[str, Any]], trouble: Callable[[], Any] | None = None) -> list[Any]:
    """Return the answers to all requests, asked at once, while ``trouble`` is made again and again.

    It is made first when the first event of a stream has come, so that no machine is too quick or too slow for it.
    """
    making: list[asyncio.Task[None]] = []

    def begin() -> None:
        if trouble is not None and not making:
            trouble()
            making.append(asyncio.create_task(make(trouble)))

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as client:
        found = await asyncio.gather(*(answer(client, url, body, begin) for body in asked))
    for task in making:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    return found


async def make(trouble: Callable[[], Any]) -> None:
    while True:
        await asyncio.sleep(0.15)
        with suppress(psutil.NoSuchProcess):  # it has ended in the meantime
            trouble()


async def events_of(lines: AsyncIterator[str]) -> AsyncIterator[Event]:
    """Yield the events of a stream."""
    event_id, rest = "", []
    async for line in lines:
        if line.startswith("id: "):
            event_id = line[4:]
        elif line:
            rest.append(line)
        elif rest:
            yield event_id, "\n".join(rest)
            rest = []


async def read(
    url: str,
    path: str,
    body: dict[str, Any],
    last_id: str = "",
    stop_at: int = 10**9,
    on_event: Callable[[], None] = lambda: None,
) -> list[Event]:
    """Return the events of a stream; those before it was cut, or the first ``stop_at``."""
    found: list[Event] = []
    headers = {"Last-Event-ID": last_id} if last_id else {}
    try:
        async with (
            httpx.AsyncClient(timeout=60) as client,
            client.stream("POST", url + path, json=body, headers=headers) as response,
        ):
            assert response.status_code == 200, (await response.aread(), last_id)
            async for event in events_of(response.aiter_lines()):
                found.append(event)
                on_event()
                if len(found) == stop_at:
                    break
    except (httpx.RemoteProtocolError, httpx.ReadError):
        pass
    return found


async def read_to_the_end(
    url: str,
    path: str,
    body: dict[str, Any],
    first: list[Event] | None = None,
    on_event: Callable[[], None] = lambda: None,
) -> list[Event]:
    """Return all events of a stream, coming back to it until it has ended."""
    found = list(first or ())
    for _ in range(_MAX_TIMES):
        if found and is_end(found[-1]):
            return found
        last_id = found[-1][0] if found else ""
        try:
            found += await read(url, path, body, last_id, on_event=on_event)
        except httpx.ConnectError:
            await asyncio.sleep(0.05)
    raise AssertionError(f"it does not end: {found[-3:]}")


def is_end(event: Event) -> bool:
    return event[1] == "data: [DONE]" or event[1].startswith(("event: response.completed", "event: response.inc"))


def by_choice(events: list[Event]) -> list[Any]:
    """Return a stream's events by choice, without what is drawn for each answer."""
    found: dict[int, list[Any]] = {}
    for _, text in events:
        data = text.rpartition("data: ")[2]
        value = {} if data == "[DONE]" else json.loads(data)
        value.pop("id", None), value.pop("created", None)
        (value.get("usage") or {}).pop("prompt_tokens_details", None)  # what was in kept blocks is chance
        for choice in value.get("choices") or [{"index": -1, **value}]:
            found.setdefault(choice["index"], []).append(choice)
    return [found[index] for index in sorted(found)]
