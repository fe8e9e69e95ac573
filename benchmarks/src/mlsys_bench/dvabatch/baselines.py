"""``mlsys dvabatch baselines``: request-level baselines on a model's cost, what DVABatch is compared with (8.1).

Staged model + load -> core's simulation with the very schedulers that serve -> latency and throughput of each baseline.
The whole model runs one batch at a time; nothing joins or leaves a batch on the way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from mlsys_core.environment import describe_environment
from mlsys_core.errors import InvalidInputError
from mlsys_core.plot import check_format, latency_vs_load, save
from mlsys_core.workload import LoadPoint
from mlsys_dvabatch.stages.simulated import StagedModel, parse_stages
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mlsys_bench.dvabatch.cases import Case, Costed, delay_batch, run_case, static_batch, zero_batch
from mlsys_bench.dvabatch.workloads import poisson_trace

app = typer.Typer()


@app.command()
def baselines(
    stage_ms: Annotated[
        str,
        typer.Option(help="What a batch costs in each stage, milliseconds: FIXED+PER_REQUEST,...", metavar="STAGES"),
    ] = "4+0.5,4+0.5",
    load: Annotated[
        str, typer.Option(help="Offered loads, as parts of the peak throughput, with commas.", metavar="LOADS")
    ] = "0.25,0.6,0.9",
    window_ms: Annotated[float | None, typer.Option(help="Window of DelayBatch; searched by default.", min=0)] = None,
    max_batch: Annotated[int, typer.Option(help="Largest batch.", min=1, max=4096)] = 64,
    requests: Annotated[int, typer.Option(help="Requests of each run.", min=2, max=1_000_000)] = 4000,
    seed: Annotated[int, typer.Option(help="Same seed, same arrivals.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw latency against load (.svg, .png, .pdf).")] = None,
) -> None:
    """Simulate the request-level baselines (ZeroBatch, DelayBatch, static batch) under Poisson arrivals.

    Example: mlsys dvabatch baselines --stage-ms 4+0.5,4+0.5 --load 0.25,0.6,0.9 --plot baselines.svg
    """
    if plot is not None:
        check_format(plot)
    model, loads = staged_model(stage_ms), parse_loads(load)
    workload = Workload(max_batch_size=max_batch, num_requests=requests, seed=seed)
    window_s = None if window_ms is None else window_ms / 1e3
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=len(loads))
        results = compare_baselines(
            model, loads, workload=workload, window_s=window_s, progress=lambda: bar.advance(task)
        )
    if plot is not None:
        policies = dict.fromkeys(result.policy for result in results)
        curves = {policy: [result.point for result in results if result.policy == policy] for policy in policies}
        save(latency_vs_load(curves, title=f"Stages of {stage_ms} ms, batches of at most {max_batch}"), plot)
    if as_json:
        print_json(results, model, workload)
    else:
        print_table(results, model, max_batch)
        if plot is not None:
            typer.echo(f"wrote {plot}")


@dataclass(frozen=True, slots=True)
class BaselineResult:
    """One baseline at one load."""

    policy: str  # "ZeroBatch", "DelayBatch", "StaticBatch"
    setting: str  # what was tuned: the window or the batch size; "" if nothing is
    load: float  # offered load over the model's peak
    mean_batch_size: float
    point: LoadPoint  # offered load, throughput (requests per second) and latency (seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests and limits with which each baseline is tried.

    Raises:
        InvalidInputError: a number is out of range.
    """

    max_batch_size: int = 64
    num_requests: int = 4000  # per run
    seed: int = 0  # seed of arrivals; with one seed all loads get the same pattern, only faster

    def __post_init__(self) -> None:
        if self.max_batch_size < 1 or self.num_requests < 2 or self.seed < 0:
            raise InvalidInputError(
                f"max_batch_size={self.max_batch_size}, num_requests={self.num_requests}, seed={self.seed}: at least 1 "
                "request in a batch and 2 in a run are needed, and a seed of 0 or more"
            )


def compare_baselines(
    model: StagedModel,
    loads: Sequence[float],
    *,
    workload: Workload,
    window_s: float | None = None,
    progress: Callable[[], None] = lambda: None,
) -> list[BaselineResult]:
    """Compare ZeroBatch, DelayBatch and StaticBatch under Poisson arrivals.

    Args:
        model: Stages, with the cost of a batch.
        loads: Parts of the peak throughput, that of full batches back to back; in (0, 1).
        workload: Requests and limits of each trial.
        window_s: DelayBatch's window. None: of a half, a quarter, ... of a full batch's time, the one with the lowest
            average latency at the highest load, and it for all loads, as an operator tunes it once.
        progress: Called after each load.

    Returns:
        Three results for each load, in the order of ``loads``. StaticBatch has at each load its own best batch size.

    Raises:
        InvalidInputError: no load, one outside (0, 1), or a negative window.

    Example:
        >>> results = compare_baselines(parse_stages("4+0.5"), [0.5], workload=Workload(num_requests=200))
        >>> [result.policy for result in results]
        ['ZeroBatch', 'DelayBatch', 'StaticBatch']
    """
    if not loads or not all(0 < load < 1 for load in loads):
        raise InvalidInputError(f"loads {list(loads)}: give at least one, each a part of the peak above 0 and below 1")
    if window_s is not None and not 0 <= window_s < math.inf:
        raise InvalidInputError(f"window_s={window_s}: DelayBatch's window must be 0 or more seconds, and finite")
    max_batch_size = workload.max_batch_size
    if window_s is None:
        windows_s = [model.seconds(max_batch_size) / divisor for divisor in (2, 4, 8, 16, 32)]
        tried = [_delay_batch(model, max(loads), window_s, workload) for window_s in windows_s]
        window_s = windows_s[tried.index(min(tried, key=_mean_latency))]
    results = []
    for load in loads:
        results.append(_run(zero_batch(max_batch_size), "", model, load, workload))
        results.append(_delay_batch(model, load, window_s, workload))
        results.append(_best_static_batch(model, load, workload))
        progress()
    return results


def _delay_batch(model: StagedModel, load: float, window_s: float, workload: Workload) -> BaselineResult:
    case = delay_batch(window_s, workload.max_batch_size)
    return _run(case, f"window {window_s * 1e3:.3g} ms", model, load, workload)


def _best_static_batch(model: StagedModel, load: float, workload: Workload) -> BaselineResult:
    """Run the batch sizes that keep up with the load, and return the one with the lowest average latency.

    Sizes are the powers of two and the maximum.
    """
    most = workload.max_batch_size
    sizes = [2**power for power in range(most.bit_length()) if 2**power < most] + [most]
    offered_rps = load * peak_rps(model, most)
    tried = [
        _run(static_batch(size), f"size {size}", model, load, workload)
        for size in sizes
        if peak_rps(model, size) > offered_rps
    ]
    return min(tried, key=_mean_latency)


def _mean_latency(result: BaselineResult) -> float:
    return result.point.latency.mean


def _run(case: Case, setting: str, model: StagedModel, load: float, workload: Workload) -> BaselineResult:
    offered_rps = load * peak_rps(model, workload.max_batch_size)
    trace = poisson_trace(offered_rps, [1] * workload.num_requests, lambda _: None, workload.seed)
    found = run_case(case, Costed(model), trace, offered_rps=offered_rps)
    policy = "StaticBatch" if case.name.startswith("static") else case.name
    return BaselineResult(policy, setting, load, workload.num_requests / found.operations["batches"], found.point)


def print_json(results: Sequence[BaselineResult], model: StagedModel, workload: Workload) -> None:
    """Print the results with their model, workload and environment."""
    report = {
        "model": {"stages": [stage._asdict() for stage in model.stages]},
        "workload": asdict(workload),
        "results": [asdict(result) for result in results],
        "environment": describe_environment(),
    }
    print(json.dumps(report, indent=1))


def print_table(results: Sequence[BaselineResult], model: StagedModel, max_batch: int) -> None:
    """Print a row for each baseline and load, and the peak throughput."""
    table = Table("load", "policy", "tuned", box=SIMPLE, padding=(0, 1, 0, 0))
    for header in ("batch", "average (ms)", "p99 (ms)", "req/s"):
        table.add_column(header, justify="right", no_wrap=True)
    for result in results:
        latency = result.point.latency
        table.add_row(
            f"{result.load:g}",
            result.policy,
            result.setting,
            f"{result.mean_batch_size:.1f}",
            f"{latency.mean * 1e3:.2f}",
            f"{latency.p99 * 1e3:.2f}",
            f"{result.point.throughput_rps:,.1f}",
            end_section=result.policy == results[-1].policy,
        )
    console = Console()
    console.print(table)
    seconds = model.seconds(max_batch)
    console.print(f"Peak {peak_rps(model, max_batch):,.1f} req/s: batches of {max_batch}, {seconds * 1e3:g} ms each")


def peak_rps(model: StagedModel, batch_size: int) -> float:
    """Return the requests per second when batches of ``batch_size`` run back to back, one at a time."""
    return batch_size / model.seconds(batch_size)


def staged_model(text: str) -> StagedModel:
    """Return the model of a text ``"FIXED+PER_REQUEST,..."`` in milliseconds, one part for each stage.

    Raises:
        InvalidInputError: the text is not of that form, or a time is negative, not finite, or 0 in all.
    """
    stages = []
    for part in text.split(","):
        try:
            (stage,) = parse_stages(part if "+" in part else f"{part}+0").stages
        except ValueError:
            raise InvalidInputError(
                f"{part.strip()!r} in {text!r} is no stage: write its milliseconds as FIXED+PER_REQUEST, like 4+0.5"
            ) from None
        if not all(0 <= time_s < math.inf for time_s in stage) or sum(stage) == 0:
            raise InvalidInputError(
                f"a stage of {stage.fixed_s} s and {stage.per_item_s} s per request: both must be finite, 0 or more, "
                "and at least one above 0"
            )
        stages.append(stage)
    return StagedModel(tuple(stages))


def parse_loads(text: str) -> list[float]:
    """Return the loads that a text like "0.25,0.6" gives; the comparison checks that each is in (0, 1).

    Raises:
        InvalidInputError: a part is no number.
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InvalidInputError(f"--load {text!r}: write numbers with commas, like 0.25,0.6") from None
