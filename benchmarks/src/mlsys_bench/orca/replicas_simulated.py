"""A fleet of replicas in virtual time: the router and the schedulers that serve, and iterations at a measured cost.

One scheduler to the loop, which has a scheduler, K/V blocks and a mirror of its prefix cache for each replica, as the
front has. Each replica is one worker of the loop.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import Finished, SimulatedExecutor, WorkerId, simulate
from mlsys_core.plugins import Registry
from mlsys_core.report import Figure, Section, Table
from mlsys_core.workload import LatencySummary
from mlsys_orca.engine.fleet.routing import KeptBlocks, Load, chain_of, choose
from mlsys_orca.scheduling.batch import IterationBatch, IterationOutput, SampledToken
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.policy import make_scheduler
from mlsys_orca.scheduling.request import GenerationRequest

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext


MAX_BATCH_SIZE = 16
MAX_MODEL_LEN = 1024
NUM_KV_TOKENS = 32_768  # of each replica
Router = Literal["fleet", "round robin"]

# Seconds of an iteration by its tokens: SmolLM2-135M in bf16 on native kernels, two threads of an AMD EPYC (Zen 4), as
# benchmarks/results/orca-native-zen4.json has them.
MEASURED_S = ((1, 0.010512), (8, 0.012086), (64, 0.057230), (256, 0.151232))


def iteration_s(batch: IterationBatch) -> float:
    """Return the seconds of an iteration, straight lines between the measured ones."""
    tokens = batch.num_tokens
    at = min(max(bisect_left(MEASURED_S, (tokens,)), 1), len(MEASURED_S) - 1)
    (low, low_s), (high, high_s) = MEASURED_S[at - 1], MEASURED_S[at]
    return low_s + (high_s - low_s) * (tokens - low) / (high - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests that begin with one of several system prompts, by a Poisson process."""

    num_requests: int
    rate: float  # requests per second
    num_groups: int  # system prompts
    shared_tokens: int = 256  # of a system prompt
    own_tokens: tuple[int, int] = (16, 128)
    output_tokens: tuple[int, int] = (16, 64)
    seed: int = 0

    def arrivals(self) -> Iterator[tuple[float, GenerationRequest]]:
        """Yield time and request, in order."""
        draw, at_s = random.Random(self.seed), 0.0
        for number in range(self.num_requests):
            at_s += draw.expovariate(self.rate)
            group, size = draw.randrange(self.num_groups), draw.randint(*self.own_tokens)
            own = tuple(draw.randrange(50_000) for _ in range(size))
            yield (
                at_s,
                GenerationRequest(
                    request_id=str(number),
                    prompt_token_ids=(*(group for _ in range(self.shared_tokens)), *own),
                    max_new_tokens=draw.randint(*self.output_tokens),
                ),
            )


@dataclass(slots=True)
class _Request:
    """Request that has not left, as the router counts it."""

    replica: int
    num_tokens: int  # of prompt and answer together
    num_left: int  # of these, not computed yet
    is_begun: bool = False


class Fleet:
    """The front's choice of a replica over each replica's own scheduler: a scheduler of the loop."""

    def __init__(self, num_replicas: int, *, policy: str, router: Router, registry: Registry) -> None:
        size = BlockTables(num_blocks=1).block_size
        self._block_size, self._router = size, router
        self._tables = [BlockTables(num_blocks=NUM_KV_TOKENS // size) for _ in range(num_replicas)]
        for tables in self._tables:
            tables.note_cache_changes()
        limits = {"max_batch_size": MAX_BATCH_SIZE, "max_model_len": MAX_MODEL_LEN}
        self._schedulers = [
            make_scheduler(policy, registry, block_tables=tables, **limits)  # type: ignore[arg-type]
            for tables in self._tables
        ]
        self._kept = [KeptBlocks() for _ in range(num_replicas)]
        self._num_left = [0] * num_replicas
        self._live: dict[str, _Request] = {}
        self._running: dict[int, tuple[int, IterationBatch]] = {}  # by the batch's identity, which it keeps alive
        self.routing_s: list[float] = []  # of each choice, by the wall clock
        self.num_placed = [0] * num_replicas
        self.num_prompt_tokens = self.num_kept_tokens = 0

    def add(self, request: GenerationRequest, now: float) -> None:
        """Place a request and hand it to its replica."""
        began_s = time.perf_counter()
        replica = self._choose(request)
        self.routing_s.append(time.perf_counter() - began_s)
        self._schedulers[replica].add(request, now)
        self._live[request.request_id] = _Request(replica, request.max_tokens, request.max_tokens)
        self._num_left[replica] += request.max_tokens
        self.num_placed[replica] += 1
        self.num_prompt_tokens += len(request.prompt_token_ids)

    def _choose(self, request: GenerationRequest) -> int:
        if self._router == "round robin":
            return sum(self.num_placed) % len(self._schedulers)
        chain = chain_of(request, self._block_size)
        loads = [
            Load(
                is_serving=True,
                num_requests=scheduler.num_unfinished,
                num_outstanding_tokens=left,
                num_shared_blocks=kept.num_leading(chain),
                num_kept_blocks=len(kept),
            )
            for scheduler, left, kept in zip(self._schedulers, self._num_left, self._kept, strict=True)
        ]
        return choose(loads, max_batch_size=MAX_BATCH_SIZE)

    def cancel(self, request_id: str, now: float) -> Sequence[Finished[Any]]:
        """Cancel a request at its replica."""
        live = self._live.get(request_id)
        return [] if live is None else self._left(self._schedulers[live.replica].cancel(request_id, now))

    def next_batch(self, worker: WorkerId, now: float) -> IterationBatch | None:
        """Return the next iteration of the replica ``worker``."""
        scheduler = self._schedulers[worker]
        if not scheduler.num_unfinished:
            return None
        batch = scheduler.next_batch(WorkerId(0), now)
        if batch is not None:
            self._running[id(batch)] = (worker, batch)
        return batch

    def complete(self, batch: IterationBatch, output: IterationOutput, now: float) -> Sequence[Finished[Any]]:
        """Take an iteration's output, and note what the replica keeps since."""
        replica, _ = self._running.pop(id(batch))
        for part in batch.requests:
            live = self._live[part.request_id]
            if not live.is_begun:
                live.is_begun = True
                self.num_kept_tokens += part.num_computed_tokens
            left = live.num_tokens - part.num_computed_tokens - part.num_tokens
            self._num_left[replica] += left - live.num_left
            live.num_left = left
        finished = self._schedulers[replica].complete(batch, output, now)
        self._kept[replica].update(self._tables[replica].take_cache_changes())
        return self._left(finished)

    def fail(self, batch: IterationBatch, error: BaseException, now: float) -> Sequence[Finished[Any]]:
        """Hand a failure to the replica."""
        replica, _ = self._running.pop(id(batch))
        return self._left(self._schedulers[replica].fail(batch, error, now))

    def wake_at(self, now: float) -> float | None:
        """Return None: a replica has an iteration to run, or waits for one to end."""
        return None

    @property
    def num_unfinished(self) -> int:
        """Number of requests that have not left."""
        return len(self._live)

    def _left(self, finished: Sequence[Finished[Any]]) -> Sequence[Finished[Any]]:
        for each in finished:
            live = self._live.pop(each.request_id)
            self._num_left[live.replica] -= live.num_left
        return finished


@dataclass(frozen=True, slots=True)
class FleetRun:
    """Result of one run. Times are of the virtual clock but ``routing_us`` and ``wall_s``."""

    router: Router
    num_replicas: int
    num_requests: int
    requests_per_s: float
    latency: LatencySummary
    latencies_s: tuple[float, ...]
    kept_share: float  # of prompt tokens, not computed again
    most_placed: float  # requests of the replica with the most, over the mean
    routing_us: float  # median of a choice
    wall_s: float


def run_fleet(num_replicas: int, traffic: Traffic, *, policy: str, router: Router, registry: Registry) -> FleetRun:
    """Simulate one fleet to the end of its traffic."""
    began_s = time.perf_counter()
    fleet = Fleet(num_replicas, policy=policy, router=router, registry=registry)
    workers = [SimulatedExecutor[IterationBatch, IterationOutput](iteration_s, _sample) for _ in range(num_replicas)]
    served = simulate(fleet, workers, traffic.arrivals()).requests
    assert len(served) == traffic.num_requests
    latency = LatencySummary.of(each.latency_s for each in served)
    assert latency is not None
    return FleetRun(
        router,
        num_replicas,
        len(served),
        len(served) / max(each.finished_s for each in served),
        latency,
        tuple(each.latency_s for each in served),
        fleet.num_kept_tokens / fleet.num_prompt_tokens,
        max(fleet.num_placed) * num_replicas / len(served),
        sorted(fleet.routing_s)[len(served) // 2] * 1e6,
        time.perf_counter() - began_s,
    )


def _sample(batch: IterationBatch) -> IterationOutput:
    return IterationOutput(tuple(SampledToken(part.request_id, 0) for part in batch.sampled))


_MOST_REPLICAS = 1000
_TEXT = (
    "Simulated in virtual time: each replica runs SmolLM2-135M in bf16 on two cores of an AMD EPYC (Zen 4), and an "
    "iteration takes what was measured there for its number of tokens (orca-native-zen4.json). Router, scheduler, "
    "prefix caches and loop are those that serve. {per_replica} requests for each replica at {rate:g} requests per "
    "second and replica; each prompt begins with one of four times as many system prompts of 256 tokens as there are "
    "replicas. Policy {policy}."
)


def run(
    context: BenchContext,
    *,
    replicas: str = "",
    requests: int = 0,
    rate: float = 1.5,
    policy: str = "paged",
) -> Section:
    """Simulate the fleets.

    Args:
        context: The suite's context.
        replicas: Numbers of replicas with commas between; empty: 1 to 1,000, or to 16 when quick.
        requests: Of each replica; 0: fewer when quick.
        rate: Requests per second for each replica.
        policy: The scheduling policy of each replica.
    """
    from mlsys_core.plot import cdf, to_svg
    from mlsys_core.plugins import installed_plugins

    sizes = _sizes(replicas or ("1,4,16" if context.is_quick else "1,10,100,1000"))
    per_replica = requests or (4 if context.is_quick else 8)
    if rate <= 0:
        raise InvalidInputError(f"rate is {rate:g}; it must be above 0")
    registry = installed_plugins().registry
    routers: tuple[Router, ...] = ("fleet", "round robin")
    runs: list[FleetRun] = []
    for size in sizes:
        traffic = Traffic(num_requests=per_replica * size, rate=rate * size, num_groups=4 * size)
        for router in routers:
            with context.console.status(f"{size} replicas, {router} ..."):
                runs.append(run_fleet(size, traffic, policy=policy, router=router, registry=registry))
    largest = [each for each in runs if each.num_replicas == sizes[-1]]
    figure = cdf(
        {each.router: each.latencies_s for each in largest},
        title=f"Latency of a request, {sizes[-1]} replicas",
    )
    data = [{**asdict(each), "latency": asdict(each.latency)} for each in runs]
    for each in data:
        del each["latencies_s"]
    return Section(
        "Orca: replicas behind one router, simulated",
        [_TEXT.format(per_replica=per_replica, rate=rate, policy=policy), _table(runs), Figure(to_svg(figure))],
        data={"policy": policy, "rate_per_replica": rate, "requests_per_replica": per_replica, "runs": data},
    )


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidInputError(f"replicas is {text!r}: write numbers with commas between, such as 1,10,100") from error
    if not all(1 <= size <= _MOST_REPLICAS for size in sizes):
        raise InvalidInputError(f"replicas is {text!r}: each number must be 1 to {_MOST_REPLICAS}")
    return sizes


def _table(runs: list[FleetRun]) -> Table:
    columns = ["replicas", "router", "requests/s", "p50 ms", "p99 ms", "prompt kept", "most placed", "choice us"]
    rows = [
        [
            f"{each.num_replicas:,}",
            each.router,
            f"{each.requests_per_s:,.1f}",
            f"{each.latency.p50 * 1e3:,.0f}",
            f"{each.latency.p99 * 1e3:,.0f}",
            f"{each.kept_share:.0%}",
            f"{each.most_placed:.2f}x",
            f"{each.routing_us:,.0f}",
        ]
        for each in runs
    ]
    return Table(columns, rows, "Prompt kept: tokens of prompts not computed again. Most placed: over the mean.")
