"""Serve many clients at once, half of whom leave midway: answers must be right, and everything freed.

    mlsys bench orca-soak clients=200 seconds=60

Starts a server of its own on a free port. Each client asks one of a few questions again and again, streamed and greedy,
and either reads to the end or closes the connection after some pieces. The text must be the answer that the question
got alone, or its beginning; a native model promises that to the bit. At the end ``/metrics`` must show no request and
no K/V block in use, else the suite fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx
from mlsys_core.report import Section

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

QUESTIONS = (
    "Why do plants need sunlight?",
    "Name two colours.",
    "What is a cat?",
    "Tell me about Rome.",
    "Count to five.",
    "Say hello in Spanish.",
)
MAX_TOKENS = 24


@dataclass
class Tally:
    """Outcomes of the clients."""

    outcomes: Counter[str] = field(default_factory=Counter)  # complete, left, busy, wrong
    wrong: list[str] = field(default_factory=list)  # a few of the wrong ones, for the eye
    requests_left: float = 0.0
    blocks_left: float = 0.0

    @property
    def is_good(self) -> bool:
        """True if no answer was wrong, nothing leaked, and the run was not idle."""
        done = self.outcomes["complete"] and self.outcomes["left"]
        return bool(done) and not (self.outcomes["wrong"] or self.requests_left or self.blocks_left)


def body_of(model: str, question: str) -> dict[str, object]:
    """Return the body of a greedy, streamed completion."""
    return {"model": model, "prompt": question, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}


async def read(client: httpx.AsyncClient, model: str, question: str, leave_after: int | None) -> tuple[int, str]:
    """Return the status and the text of one answer, up to ``leave_after`` pieces."""
    pieces: list[str] = []
    async with client.stream("POST", "/v1/completions", json=body_of(model, question)) as response:
        if response.status_code != 200:
            await response.aread()
            return response.status_code, response.text
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                break
            if line.startswith("data: "):
                pieces.append("".join(choice["text"] for choice in json.loads(line[6:])["choices"]))
                if leave_after is not None and len(pieces) > leave_after:
                    break
    return 200, "".join(pieces)


async def one_client(
    client: httpx.AsyncClient, model: str, expected: dict[str, str], until_s: float, seed: int, tally: Tally
) -> None:
    """Send requests until the time is over."""
    chance = random.Random(seed)
    questions = sorted(expected)
    while time.monotonic() < until_s:
        question = chance.choice(questions)
        leave_after = chance.randrange(MAX_TOKENS) if chance.random() < 0.5 else None
        status, text = await read(client, model, question, leave_after)
        if status == 429:
            tally.outcomes["busy"] += 1
            await asyncio.sleep(chance.random())
        elif status == 200 and (
            text == expected[question] if leave_after is None else expected[question].startswith(text)
        ):
            tally.outcomes["complete" if leave_after is None else "left"] += 1
        else:
            tally.outcomes["wrong"] += 1
            tally.wrong.append(f"{status} {question!r}: {text!r} instead of {expected[question]!r}")


async def soak(
    url: str, model: str, *, num_clients: int, seconds: float, questions: Sequence[str] = QUESTIONS, seed: int = 0
) -> Tally:
    """Run the clients against a running server, and wait until it has nothing left to do."""
    tally = Tally()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        expected = {question: (await read(client, model, question, None))[1] for question in questions}
        until_s = time.monotonic() + seconds
        await asyncio.gather(
            *(one_client(client, model, expected, until_s, seed + number, tally) for number in range(num_clients))
        )
        for _ in range(600):
            text = (await client.get("/metrics")).text
            tally.requests_left, tally.blocks_left = (
                float(re.search(rf"^mlsys_orca_{name}\{{.*\}} (\S+)$", text, flags=re.M)[1])  # type: ignore[index]
                for name in ("num_requests_unfinished", "kv_blocks_used")
            )
            if not tally.requests_left and not tally.blocks_left:
                break
            await asyncio.sleep(0.05)
    return tally


def run(
    context: BenchContext,
    *,
    model: str = "smollm2-135m-instruct",
    clients: int = 200,
    seconds: float = 60.0,
    policy: str = "chunked",
) -> Section:
    """Serve, soak, report.

    Args:
        context: The suite's context; quick has 20 clients for 2 seconds.
        model: A name or a path.
        clients: Connections at once.
        seconds: How long they ask.
        policy: The server's scheduling policy.
    """
    from mlsys_core.config import settings
    from mlsys_core.models import resolve_model
    from mlsys_orca.api.server import make_app, make_service
    from mlsys_orca.engine.engine import EngineConfig
    from mlsys_orca.loading.load import load_model
    from mlsys_serving.http import BackgroundServer, HttpConfig
    from mlsys_serving.http.record import make_logger

    if context.is_quick:
        clients, seconds = 20, 2.0
    config = EngineConfig(
        max_batch_size=32,
        max_model_len=512,
        num_threads=context.num_threads,
        policy=policy,
        batch_invariant=True,
        max_waiting=max(1, clients // 2),
    )
    service = make_service(load_model(resolve_model(model, settings().cache_dir), dtype="fp32"), "model", config)
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - the log of some thousand requests
        app = make_app(service, HttpConfig(validation_status=400), logger=make_logger("json", stream=nowhere))
        with BackgroundServer(app) as server:
            tally = asyncio.run(soak(server.url, "model", num_clients=clients, seconds=seconds))
    counts = ", ".join(f"{number} {outcome}" for outcome, number in tally.outcomes.items())
    left = f"{tally.requests_left:g} requests, {tally.blocks_left:g} K/V blocks"
    body = [f"{clients} clients, {seconds:g} s: {counts}. Left over: {left}.", *tally.wrong[:5]]
    return Section("Orca: clients who leave", body, "ok" if tally.is_good else "failed", {"outcomes": tally.outcomes})
