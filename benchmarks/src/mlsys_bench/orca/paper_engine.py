"""Section 6.2 on the real engine with a real, small model: the paper's traces with lengths scaled down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mlsys_core.workload import LoadPoint
from mlsys_orca.api.server import available_memory_nbytes
from mlsys_orca.engine.engine import EngineConfig

from mlsys_bench.orca.answers import Comparison, compare
from mlsys_bench.orca.paper import ALONE, Case, scaled
from mlsys_bench.orca.serve import ServedRun, Workload, serve_trace
from mlsys_bench.workload.lengths import Constant
from mlsys_bench.workload.tables import progress_bar

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_orca.loading.loaded import LoadedModel

CASES = (
    Case("orca", 1),
    Case("orca", 8),
    Case("orca", 32),
    Case("request-level", 1),
    Case("request-level", 8),
)
QUICK_CASES = (Case("orca", 8), Case("request-level", 1), Case("request-level", 8))
LOADS = (0.2, 0.4, 0.6, 0.8, 0.95)  # of what the case does all at once: each has its own range
QUICK_LOADS = (0.3, 0.8)
_NUM_ALONE = 5  # requests, one after another


def alone_s(loaded: LoadedModel, context: BenchContext, *, scale: float) -> float:
    """Measure a lone request's normalised latency, in seconds for each output token: the median of a few.

    Lengths are the paper's of Figure 4.7c, scaled.
    """
    num_input, num_output = (scaled(length, scale) for length in ALONE)
    workload = Workload(prompts=Constant(num_input), outputs=Constant(num_output), num_requests=_NUM_ALONE)
    # Due one after another: with room for one at a time, each runs by itself; waiting is taken out below.
    run = _serve(loaded, Case("orca", 1), workload, None, context, label="one request by itself")
    ends = sorted(record.done_s for record in run.result.successes)
    starts = [min(record.scheduled_s for record in run.result.successes), *ends]
    durations = sorted(end - start for start, end in zip(starts, ends, strict=False))
    return durations[len(durations) // 2] / num_output


def measure_case(
    loaded: LoadedModel,
    case: Case,
    workload: Workload,
    context: BenchContext,
    *,
    loads: Sequence[float],
    expected: dict[int, tuple[int, ...]],
) -> Iterator[tuple[LoadPoint, Comparison, bool]]:
    """Run the case at shares of its throughput with all requests at once.

    Args:
        loaded: The model.
        case: The scheduling that serves.
        workload: The requests.
        context: The suite's.
        loads: Shares, rising.
        expected: The answers so far, by request; those of requests not yet in it are added.

    Yields:
        The run as a point, its answers compared with ``expected``, and whether Ctrl-C cut it short.
    """
    requests = workload.requests(loaded.tokenizer)
    rates: list[float | None] = [None]
    while rates:
        rate = rates.pop(0)
        label = case.label if rate is None else f"{case.label}, {rate:.3g} req/s"
        run = _serve(loaded, case, workload, rate, context, label=label)
        comparison = compare(expected, run.answers, loaded=loaded, requests=requests)
        _add(expected, run.answers)
        if rate is None:
            rates = [load * run.result.throughput_rps for load in loads]
            if not run.result.interrupted and not comparison.num_wrong:
                continue
        if run.result.successes:
            yield run.result.point(), comparison, run.result.interrupted
        if run.result.interrupted or comparison.num_wrong:
            return


def _serve(
    loaded: LoadedModel,
    case: Case,
    workload: Workload,
    rate: float | None,
    context: BenchContext,
    *,
    label: str,
) -> ServedRun:
    requests = workload.requests(loaded.tokenizer)
    config = EngineConfig(
        max_batch_size=case.max_batch_size,
        max_model_len=max(request.max_tokens for request in requests),
        num_threads=context.num_threads,
        policy=case.policy,
        policy_options=case.options,
    )
    with progress_bar(context.console, label) as show:
        return serve_trace(
            loaded,
            config,
            workload.trace(rate),
            requests,
            name=label,
            available_nbytes=available_memory_nbytes(loaded.device),
            on_progress=show,
        )


def _add(expected: dict[int, tuple[int, ...]], answers: Mapping[int, tuple[int, ...]]) -> None:
    for index, tokens in answers.items():
        expected.setdefault(index, tokens)
