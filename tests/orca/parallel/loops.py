"""A serving loop over any executor, and requests of every kind for it."""

from __future__ import annotations

import random
from typing import Any

from mlsys_core.loop import Collector, Executor, FinishReason, ServingLoop, WallClock
from mlsys_core.plugins import installed_plugins
from mlsys_orca.scheduling.batch import GenerationRequest, IterationBatch, IterationOutput, SamplingParams
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.policy import make_scheduler


def requests_of(
    number: int,
    *,
    seed: int = 0,
    longest: int = 40,
) -> list[GenerationRequest]:
    """Prompts of which some begin alike, with different ways to choose."""
    chance = random.Random(seed)
    beginning = [chance.randrange(2, 258) for _ in range(20)]
    made = []
    for index in range(number):
        own = [chance.randrange(2, 258) for _ in range(chance.randrange(1, longest - 20))]
        sampling = chance.choice(
            [
                SamplingParams(allowed_token_ids=(4, 5)),
                SamplingParams(temperature=0.8, seed=index, top_p=0.9),
                SamplingParams(num_logprobs=2, presence_penalty=0.5),
                SamplingParams(num_prompt_logprobs=0),
            ]
        )
        prompt = tuple(beginning[: chance.choice([0, 20])] + own)
        made.append(
            GenerationRequest(
                request_id=f"r{index}",
                prompt_token_ids=prompt,
                max_new_tokens=chance.choice([2, 8, 24]),
                sampling=sampling,
                stop_token_ids=frozenset([1]),
            )
        )
    return made


class Run:
    """A loop over an executor, driven by hand."""

    def __init__(
        self,
        executor: Executor[IterationBatch, IterationOutput],
        policy: str,
        *,
        num_blocks: int,
        drafts: int = 0,
        most_tokens: int = 24,
    ) -> None:
        self.tables = BlockTables(num_blocks=num_blocks)
        options = {"max_batch_tokens": most_tokens} if policy == "chunked" else {}
        registry = installed_plugins().registry
        limits: dict[str, Any] = {"block_tables": self.tables, "max_batch_size": 3, "max_model_len": 64}
        self.scheduler: Any = make_scheduler(policy, registry, **limits, options=options)
        self.scheduler.pool.num_draft_tokens = drafts
        self.collector = Collector()
        self.loop: ServingLoop[Any, Any, Any] = ServingLoop(
            self.scheduler, executor, WallClock(), listener=self.collector
        )

    def tokens(self, requests: list[GenerationRequest], *, exactly: bool = False) -> dict[str, Any]:
        """Return each request's tokens, exactly with their log-probabilities and its prompt's."""
        for request in requests:
            self.loop.submit(request, request.request_id)
        assert self.loop.drain(timeout_s=120)
        return {name: self._result(finished, exactly) for name, finished in self.collector.finished.items()}

    @staticmethod
    def _result(finished: Any, exactly: bool) -> Any:
        assert finished.reason is FinishReason.DONE, finished
        if exactly:
            tokens = [(token.token_id, token.logprob, token.top_logprobs) for token in finished.result.tokens]
            # A prompt may be computed twice, and in other chunks.
            places = (
                (part.position + at, token) for part in finished.result.scored for at, token in enumerate(part.tokens)
            )
            return tokens, dict(sorted(places, key=lambda place: place[0]))
        return [token.token_id for token in finished.result.tokens], len(finished.result.scored)
