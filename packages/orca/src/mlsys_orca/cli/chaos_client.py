"""Clients of ``mlsys orca chaos``: mixed streams of tokens, and how an answer compares with the undisturbed one."""

from __future__ import annotations

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
Answer = dict[int, list[str]]  # by choice, the pieces in order: a token's text with its log-probabilities


def verdict_of(expected: Answer, found: Answer) -> Verdict:
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


class StreamClients:
    """Clients that ask a server for streamed completions: :class:`~mlsys_serving.instances.chaos.Clients`.

    Args:
        num_requests: Different requests, all at once in the undisturbed run.
        seed: Of the requests.
    """

    def __init__(self, num_requests: int, seed: int) -> None:
        self.num_at_once = num_requests
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
        """Return an answer; None: it was cut short.

        Raises:
            ServingError: the request is refused.
        """
        answer: Answer = {}
        last_s = 0.0
        body = self._bodies[number]
        async with http.stream("POST", "/v1/completions", json=body, timeout=None) as response:
            if response.status_code == 400:
                raise ServingError(f"the server refuses {body}: {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return answer
                if not line.startswith("data: "):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self._errors[event["error"]["message"]] += 1
                for choice in event.get("choices", ()):
                    piece = json.dumps([choice["text"], choice.get("logprobs"), choice["finish_reason"]])
                    answer.setdefault(choice["index"], []).append(piece)
                now_s = time.monotonic()
                if last_s:
                    self._gaps_s[is_troubled].append(now_s - last_s)
                last_s = now_s
        return None

    def verdict(self, expected: Answer, found: Answer) -> Verdict:
        """Compare to the last digit."""
        return verdict_of(expected, found)

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
