"""One run: a trace through an engine of its own in this process, with what came back and what the scheduler counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlsys_orca.engine.engine import Engine, EngineConfig
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.scheduling.batch import SampledToken
from mlsys_orca.scheduling.request import GenerationRequest

from mlsys_bench.workload.loadgen import LoadOptions, LoadProgress, run_load_blocking
from mlsys_bench.workload.results import LoadResult
from mlsys_bench.workload.targets import OnToken, Outcome
from mlsys_bench.workload.trace import Trace, TraceItem

Answers = Mapping[int, tuple[int, ...]]  # index of the request -> the tokens it got, of those that were answered


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """Result of serving a trace."""

    result: LoadResult
    answers: Answers
    num_preemptions: int | None  # None: the policy keeps no pool
    num_cached_tokens: int | None


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
        on_progress: See :func:`mlsys_core.workload.run_load`.
    """
    with Engine(loaded, config, available_nbytes=available_nbytes) as engine:
        _warm_up(engine)
        target = EngineTarget(engine, requests)
        result = run_load_blocking(trace, target, options=LoadOptions(name=name), on_progress=on_progress)
        pool = engine.pool
        return ServedRun(
            result=result,
            answers=target.answers,
            num_preemptions=None if pool is None else pool.num_preemptions,
            num_cached_tokens=None if pool is None else pool.num_cached_tokens,
        )


def _warm_up(engine: Engine) -> None:
    """Run a prefill and a decode; the prompt fills no block, so none is kept for others to find."""
    request = GenerationRequest(request_id="warm-up", prompt_token_ids=(0,) * 8, max_new_tokens=2)
    trace = Trace((TraceItem(0.0, 8, 2),))
    run_load_blocking(trace, EngineTarget(engine, [request]))
