"""The suite ``mlsys bench orca-replicas``: fleets of up to 1,000 replicas in virtual time, by router."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from mlsys_core.errors import InvalidInputError
from mlsys_core.report import Figure, Section, Table

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

    from mlsys_bench.orca.replicas_simulated import FleetRun

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

    from mlsys_bench.orca.replicas_simulated import Router, Traffic, run_fleet

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
