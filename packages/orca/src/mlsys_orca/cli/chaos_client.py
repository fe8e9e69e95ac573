"""Clients of ``mlsys orca chaos``: mixed streams of tokens, and how an answer compares with the undisturbed one."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from typing import Any

import httpx
from mlsys_core.errors import ServingError
from mlsys_serving.instances.chaos import ChaosTally, Verdict

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
Pieces = dict[int, list[str]]  # by choice, in order: a token's text with its log-probabilities
_COME_BACK_S, _PATIENCE_S = 0.05, 120.0


class Answer(dict[int, list[str]]):
    """Pieces by choice; ``is_whole`` is False if their connection broke."""

    is_whole = False


def verdict_of(expected: Pieces, found: Pieces) -> Verdict:
    """Return how an answer differs: it misses pieces, has more than there are, or has others.

    Example:
        >>> verdict_of({0: ["a", "b"]}, {0: ["a", "b"]}), verdict_of({0: ["a", "b"]}, {0: ["b"]})
        ('equal', 'lost')
        >>> verdict_of({0: ["a", "b"]}, {0: ["a", "a", "b"]}), verdict_of({0: ["a", "b"]}, {0: ["a", "c"]})
        ('twice', 'different')
    """
    if expected == found:
        return "equal"
    wanted, had = (
        Counter((index, piece) for index, pieces in each.items() for piece in pieces) for each in (expected, found)
    )
    if had < wanted:
        return "lost"
    return "twice" if had > wanted else "different"


class _BrokenError(Exception):
    """A connection broke after the event ``last_id``, or a server that is not there or not ready took none."""

    def __init__(self, last_id: str, *, has_begun: bool) -> None:
        super().__init__(last_id)
        self.last_id, self.has_begun = last_id, has_begun


class StreamClients:
    """Clients that ask a server for streamed completions: :class:`~mlsys_serving.instances.chaos.Clients`.

    Args:
        num_requests: Different requests, all at once in the undisturbed run.
        seed: Of the requests.
        come_back: They go on reading where their connection broke: the server has a journal.
    """

    def __init__(self, num_requests: int, seed: int, *, come_back: bool = False) -> None:
        self.num_at_once = num_requests
        self._comes_back = come_back
        self._rng = random.Random(seed)
        self._bodies: list[dict[str, Any]] = []
        self._gaps_s: dict[bool, list[float]] = {False: [], True: []}  # between two pieces, by is_troubled
        self._errors: Counter[str] = Counter()  # that ended answers, by message

    async def prepare(self, http: httpx.AsyncClient) -> int:
        """Make requests that fit the model's context."""
        (card, *_) = (await http.get("/v1/models")).raise_for_status().json()["data"]
        self._bodies = [self._body(number, card["id"], card["max_model_len"]) for number in range(self.num_at_once)]
        return len(self._bodies)

    def _body(self, number: int, model: str, max_model_len: int) -> dict[str, Any]:
        subject = self._rng.choice(("cats", "Paris", "trains", "rain", "the number seven"))
        max_tokens = min(self._rng.randint(16, 96), max_model_len // 4)
        prompt = f"{number}. Some sentences about {subject}. " * self._rng.randint(1, 10)
        return {
            "model": model,
            "prompt": prompt[: max_model_len // 2],  # a character is a token at most
            "max_tokens": max_tokens,
            "seed": number,
            "ignore_eos": True,
            "stream": True,
            **_KINDS[number % len(_KINDS)],
        }

    async def ask(self, http: httpx.AsyncClient, number: int, *, is_troubled: bool) -> Answer | None:
        """Return an answer; None: it was cut short, and not by the end of its connection.

        Raises:
            ServingError: the request is refused.
        """
        answer, last_id, until_s = Answer(), "", time.monotonic() + _PATIENCE_S
        while time.monotonic() < until_s:
            try:
                last_id = await self._read(http, number, answer, last_id, is_troubled=is_troubled)
            except _BrokenError as error:
                last_id = error.last_id
                if error.has_begun and not self._comes_back:
                    return answer
            else:
                return answer if answer.is_whole else None
            await asyncio.sleep(_COME_BACK_S)
        return None

    async def _read(
        self, http: httpx.AsyncClient, number: int, answer: Answer, last_id: str, *, is_troubled: bool
    ) -> str:
        """Add a stream's events after ``last_id`` to the answer; return the id of the last one.

        Raises:
            _BrokenError: the connection broke, or there is no server that takes it now.
        """
        last_s, event_id, body = 0.0, last_id, self._bodies[number]
        headers = {"Last-Event-ID": last_id} if last_id else {}
        try:
            async with http.stream("POST", "/v1/completions", json=body, headers=headers, timeout=None) as response:
                if response.status_code == 400:
                    raise ServingError(f"the server refuses {body}: {(await response.aread()).decode()}")
                if response.status_code == 503:
                    raise _BrokenError(last_id, has_begun=False)
                if response.status_code != 200:
                    self._errors[f"status {response.status_code}: {(await response.aread()).decode()}"] += 1
                async for line in response.aiter_lines():
                    if line.startswith("id: "):
                        event_id = line[4:]
                    elif line == "data: [DONE]":
                        answer.is_whole = True
                        return event_id
                    elif line.startswith("data: "):
                        self._note(json.loads(line[6:]), answer)
                        last_id, now_s = event_id, time.monotonic()
                        if last_s:
                            self._gaps_s[is_troubled].append(now_s - last_s)
                        last_s = now_s
        except httpx.TransportError as error:
            raise _BrokenError(last_id, has_begun=not isinstance(error, httpx.ConnectError)) from error
        return last_id

    def _note(self, event: dict[str, Any], answer: Answer) -> None:
        if "error" in event:
            self._errors[event["error"]["message"]] += 1
        for choice in event.get("choices", ()):
            piece = json.dumps([choice["text"], choice.get("logprobs"), choice["finish_reason"]])
            answer.setdefault(choice["index"], []).append(piece)

    def verdict(self, expected: Answer, found: Answer) -> Verdict:
        """Compare to the last digit; a broken answer counts as cut if it is a beginning."""
        if found.is_whole:
            return verdict_of(expected, found)
        begins = all(expected.get(index, [])[: len(pieces)] == pieces for index, pieces in found.items())
        return "cut" if begins else "different"

    async def finish(self, http: httpx.AsyncClient, tally: ChaosTally) -> None:
        """Add deaths, recomputed tokens and stalls, as the server counts them, and gaps between tokens."""
        counts: dict[str, float] = {}
        for line in (await http.get("/metrics")).text.splitlines():
            name, _, rest = line.partition("{")
            if name.startswith("mlsys_orca_") and rest:
                counts[name.removeprefix("mlsys_orca_")] = float(rest.rpartition(" ")[2])
        tally.more |= {message: f"{number} times" for message, number in self._errors.most_common()}
        tally.more["deaths of workers"] = f"{counts.get('worker_deaths_total', 0):.0f}"
        tally.more["tokens recomputed"] = f"{counts.get('recomputed_tokens_total', 0):.0f}"
        tally.more["longest stall by a death, ms"] = f"{1e3 * counts.get('longest_stall_seconds', 0):.0f}"
        for name, gaps in (("undisturbed", self._gaps_s[False]), ("troubled", self._gaps_s[True])):
            ordered = sorted(gaps) or [0.0]
            p99 = ordered[int(0.99 * (len(ordered) - 1))]
            tally.more[f"gaps between tokens, {name}, ms"] = f"p99 {1e3 * p99:.0f}, longest {1e3 * ordered[-1]:.0f}"
