"""Requests of a benchmark: of drawn lengths, the same ones at every load and to every case."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mlsys_core.errors import InvalidInputError
from mlsys_core.workload import Poisson
from mlsys_orca.scheduling.request import GenerationRequest
from mlsys_orca.text.tokenizer import Tokenizer

from mlsys_bench.workload.lengths import Lengths
from mlsys_bench.workload.targets import synthetic_prompt
from mlsys_bench.workload.trace import Trace, make_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests by the numbers. No answer ends before its length: stop tokens are off (ORCA, section 6, scenarios)."""

    prompts: Lengths  # tokens of each prompt
    outputs: Lengths  # tokens of each answer
    num_requests: int
    shared_prefix: int = 0  # tokens that all prompts begin with, as a system prompt; they come before the drawn ones
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shared_prefix < 0:
            raise InvalidInputError(f"a shared prefix of {self.shared_prefix} tokens: it must be 0 or more")

    def trace(self, rate: float | None) -> Trace:
        """Return arrivals by a Poisson process of ``rate`` requests per second; None: all at once."""
        trace = make_trace(
            Poisson(rate or 1.0),
            prompts=self.prompts,
            outputs=self.outputs,
            num_items=self.num_requests,
            seed=self.seed,
        )
        if rate is None:
            items = tuple(dataclasses.replace(item, arrival_s=0.0) for item in trace)
            trace = Trace(items, {**trace.made_by, "arrivals": "all at once"})
        return trace

    def requests(self, tokenizer: Tokenizer) -> list[GenerationRequest]:
        """Return the requests in order of arrival, their numbers as ids; greedy. Prompts are common words."""
        prefix = exactly(self.shared_prefix, tokenizer, seed=-1)
        return [
            GenerationRequest(
                request_id=str(item.index),
                prompt_token_ids=(*prefix, *exactly(item.num_input_tokens, tokenizer, seed=item.index)),
                max_new_tokens=item.num_output_tokens,
            )
            for item in self.trace(None)
        ]


def exactly(num_tokens: int, tokenizer: Tokenizer, *, seed: int) -> tuple[int, ...]:
    """Return ``num_tokens`` token ids of a text of common words, each of which is one token or more."""
    return tuple(tokenizer.encode(" " + synthetic_prompt(num_tokens, seed=seed))[:num_tokens])
