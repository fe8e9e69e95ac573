"""Requests of a benchmark: one seeded trace for all, prompts as token ids and as text (ORCA, section 6.1, smaller)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from mlsys_core.workload import Poisson

from mlsys_bench.orca.peers.models import NUM_SILENT_TOKENS, VOCABULARY_SIZE, vocabulary
from mlsys_bench.workload.arrivals import Replay
from mlsys_bench.workload.lengths import Uniform
from mlsys_bench.workload.trace import Trace, make_trace

PROMPTS, OUTPUTS = Uniform(16, 256), Uniform(1, 64)


@dataclass(frozen=True, slots=True)
class Traffic:
    """A trace without prompts, and the prompt of each of its items."""

    name: str  # "offline", or the rate
    trace: Trace
    prompts: tuple[tuple[int, ...], ...]  # token ids; prompts[i] has trace.items[i].num_input_tokens
    words: tuple[str, ...]  # text of each token

    def over_http(self, body: Mapping[str, Any]) -> Trace:
        """Return the trace for the load generator: each request with its prompt, and the fields of ``body``."""
        items = (
            dataclasses.replace(item, extra={**body, "prompt": list(prompt)})
            for item, prompt in zip(self.trace, self.prompts, strict=True)
        )
        return Trace(tuple(items), self.trace.made_by)

    def in_process(self) -> list[dict[str, Any]]:
        """Return the requests for a child process, as JSON values."""
        return [
            {"arrival_s": item.arrival_s, "prompt": list(prompt), "num_tokens": item.num_output_tokens}
            for item, prompt in zip(self.trace, self.prompts, strict=True)
        ]

    def text(self, tokens: tuple[int, ...]) -> str:
        """Return the text of ``tokens``, which tokenizes to just these."""
        return "".join(self.words[token] for token in tokens)


def make_traffic(model: str, rate: float | None, *, num_requests: int, seed: int) -> Traffic:
    """Make ``num_requests`` requests for ``model``: all at once, or by a Poisson process of ``rate`` per second.

    Example:
        >>> traffic = make_traffic("llama", None, num_requests=3, seed=0)
        >>> traffic.name, traffic.trace.items[2].arrival_s
        ('offline', 0.0)
        >>> len(traffic.prompts[0]) == traffic.trace.items[0].num_input_tokens
        True
    """
    arrivals = Replay((0.0,) * num_requests) if rate is None else Poisson(rate)
    trace = make_trace(arrivals, prompts=PROMPTS, outputs=OUTPUTS, num_items=num_requests, seed=seed)
    size = VOCABULARY_SIZE[model]
    rng = np.random.default_rng([seed, size])
    prompts = tuple(tuple(rng.integers(NUM_SILENT_TOKENS, size, item.num_input_tokens).tolist()) for item in trace)
    words = tuple(token.replace("Ġ", " ") for token in vocabulary(size)[0])
    return Traffic("offline" if rate is None else f"{rate:g} req/s", trace, prompts, words)
