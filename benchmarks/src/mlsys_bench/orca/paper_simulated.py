"""Section 6.2 on the paper's own cluster, simulated: the serving loop and the schedulers that serve, in virtual time.

An iteration takes what :mod:`.cluster` says, through pipeline stages that work at the same time; answers have the
length asked for. Only the GPUs are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mlsys_core.loop import SimulatedExecutor, simulate
from mlsys_core.plugins import Registry
from mlsys_core.workload import LatencySummary, LoadPoint
from mlsys_orca.scheduling.batch import BatchBuilder, IterationBatch, IterationOutput, SampledToken, SamplingParams
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.policy import make_scheduler
from mlsys_orca.scheduling.request import GenerationRequest

from mlsys_bench.orca.cluster import Cluster
from mlsys_bench.orca.paper import ALONE, Case, Curve
from mlsys_bench.orca.workload import Workload

MAX_MODEL_LEN = 2048  # the models' maximum sequence length
CASES = (
    *(Case("orca", size) for size in (1, 8, 32, 128)),
    *(Case("request-level", *sizes) for sizes in ((1, 1), (8, 4), (8, 8), (32, 32))),
)
FIRST_RATE, RATE_FACTOR = 0.05, 1.4  # requests per second, and from one run to the next
_STOP_AT = 4.0  # times the latency of interest: past it a curve goes straight up
_OVERLOADED = 2.0  # offered over done: past it a higher rate changes nothing but the wait


def alone_s(cluster: Cluster) -> float:
    """Return the normalised execution time of a request by itself, in seconds for each output token."""
    num_input, num_output = ALONE
    first_s = cluster.iteration_s(_batch(0, num_input))
    later_s = sum(cluster.iteration_s(_batch(num_input + step, 1)) for step in range(num_output - 1))
    return (first_s + later_s) / num_output


def _batch(num_computed: int, num_tokens: int) -> IterationBatch:
    builder = BatchBuilder()
    builder.add("a", [0] * num_tokens, num_computed_tokens=num_computed, block_table=(0,), sampling=SamplingParams())
    return builder.build()


def simulate_curve(
    case: Case,
    workload: Workload,
    cluster: Cluster,
    *,
    latency_s: float,
    registry: Registry,
    on_point: Callable[[LoadPoint], None] = lambda _: None,
) -> Curve:
    """Simulate rising rates, until the median latency is far above the one of interest, or the cluster far behind.

    Args:
        case: The scheduling that serves.
        workload: The requests.
        cluster: The machines that run the iterations.
        latency_s: The median normalised latency of interest, seconds per token.
        registry: Where the policy is looked up.
        on_point: Hears each run as it ends.
    """
    points: list[LoadPoint] = []
    for rate in _rates():
        point = simulate_point(case, workload, cluster, rate=rate, registry=registry)
        points.append(point)
        on_point(point)
        assert point.normalized_latency is not None
        if point.normalized_latency.p50 > _STOP_AT * latency_s or rate > _OVERLOADED * point.throughput_rps:
            break
    return Curve(case, tuple(points))


def simulate_point(case: Case, workload: Workload, cluster: Cluster, *, rate: float, registry: Registry) -> LoadPoint:
    """Simulate one run at ``rate`` requests per second, with a scheduler of its own."""
    tables = BlockTables(num_blocks=cluster.num_kv_tokens // BlockTables(num_blocks=1).block_size)
    scheduler = make_scheduler(
        case.policy,
        registry,
        block_tables=tables,
        max_batch_size=case.max_batch_size,
        max_model_len=MAX_MODEL_LEN,
        options=case.options,
    )
    items = workload.trace(rate).items
    requests = (
        GenerationRequest(
            request_id=str(item.index),
            prompt_token_ids=(0,) * item.num_input_tokens,
            max_new_tokens=item.num_output_tokens,
        )
        for item in items
    )
    trace = zip((item.arrival_s for item in items), requests, strict=True)
    served = simulate(scheduler, SimulatedExecutor(cluster.stages(), _sample), trace).requests
    num_output = {str(item.index): item.num_output_tokens for item in items}
    latency = LatencySummary.of(each.latency_s for each in served)
    assert latency is not None
    duration_s = max(each.finished_s for each in served) - items[0].arrival_s
    return LoadPoint(
        offered_rps=rate,
        throughput_rps=len(served) / duration_s,
        latency=latency,
        normalized_latency=LatencySummary.of(each.latency_s / num_output[each.request_id] for each in served),
    )


def _rates() -> Iterator[float]:
    rate = FIRST_RATE
    while True:
        yield rate
        rate *= RATE_FACTOR


def _sample(batch: IterationBatch) -> IterationOutput:
    return IterationOutput(tuple(SampledToken(part.request_id, 0) for part in batch.sampled))
