"""Requests of a benchmark, the same at every load and to every case, and an engine of this process that serves them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlsys_core.workload import Poisson
from mlsys_orca.engine.engine import Engine, EngineConfig
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.scheduling.batch import GenerationRequest, SampledToken
from mlsys_orca.text.tokenizer import Tokenizer

from mlsys_bench.workload.lengths import Lengths
from mlsys_bench.workload.loadgen import LoadOptions, LoadProgress, run_load_blocking
from mlsys_bench.workload.results import LoadResult
from mlsys_bench.workload.targets import OnToken, Outcome, synthetic_prompt
from mlsys_bench.workload.trace import Trace, TraceItem, make_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests by the numbers. No answer ends before its length: stop tokens are off (ORCA, section 6, scenarios)."""

    prompts: Lengths  # tokens of each prompt
    outputs: Lengths  # tokens of each answer
    num_requests: int
    seed: int = 0

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
        return [
            GenerationRequest(
                request_id=str(item.index),
                prompt_token_ids=exactly(item.num_input_tokens, tokenizer, seed=item.index),
                max_new_tokens=item.num_output_tokens,
            )
            for item in self.trace(None)
        ]


def exactly(num_tokens: int, tokenizer: Tokenizer, *, seed: int) -> tuple[int, ...]:
    """Return ``num_tokens`` token ids of a text of common words, each of which is one token or more."""
    return tuple(tokenizer.encode(" " + synthetic_prompt(num_tokens, seed=seed))[:num_tokens])


Answers = Mapping[int, tuple[int, ...]]  # index of the request -> the tokens it got, of those that were answered


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """Result of serving a trace."""

    result: LoadResult
    answers: Answers


class EngineTarget:
    """A load generator's target: asks an engine of this process for ``requests[item.index]``."""

    def __init__(self, engine: Engine, requests: Sequence[GenerationRequest]) -> None:
        self.answers: dict[int, tuple[int, ...]] = {}
        self._engine = engine
        self._requests = requests

    async def send(self, item: TraceItem, on_token: OnToken) -> Outcome:
        """Generate one answer; see :meth:`mlsys_bench.workload.targets.Target.send`."""
        tokens = []
        request = self._requests[item.index]
        async for each in self._engine.generate(request):
            if isinstance(each, SampledToken):
                on_token()
                tokens.append(each.token_id)
        self.answers[item.index] = tuple(tokens)
        return Outcome(num_output_tokens=len(tokens), num_input_tokens=len(request.prompt_token_ids))

    async def aclose(self) -> None:
        """Release nothing: the engine is its owner's."""


def serve_trace(
    loaded: LoadedModel,
    config: EngineConfig,
    trace: Trace,
    requests: Sequence[GenerationRequest],
    *,
    name: str,
    available_nbytes: int,
    on_progress: Callable[[LoadProgress], None] | None = None,
) -> ServedRun:
    """Serve ``trace`` with a new engine, which has run a request of its own before. Ctrl-C ends the run early.

    Args:
        loaded: The model.
        config: The engine's.
        trace: When ``requests`` arrive.
        requests: By the index of the trace's items.
        name: Name of the result.
        available_nbytes: Memory for keys and values.
        on_progress: See :func:`mlsys_bench.workload.loadgen.run_load`.
    """
    with Engine(loaded, config, available_nbytes=available_nbytes) as engine:
        _warm_up(engine)
        target = EngineTarget(engine, requests)
        result = run_load_blocking(trace, target, options=LoadOptions(name=name), on_progress=on_progress)
        return ServedRun(result=result, answers=target.answers)


def _warm_up(engine: Engine) -> None:
    """Run a prefill and a decode; the prompt fills no block, so none is kept for others to find."""
    request = GenerationRequest(request_id="warm-up", prompt_token_ids=(0,) * 8, max_new_tokens=2)
    trace = Trace((TraceItem(0.0, 8, 2),))
    run_load_blocking(trace, EngineTarget(engine, [request]))
