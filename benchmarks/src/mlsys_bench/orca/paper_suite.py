"""The suite ``mlsys bench orca-paper``: traces, cases and loads by back end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mlsys_core.errors import InvalidInputError
from mlsys_core.report import Section, Table
from mlsys_core.workload import LoadPoint

from mlsys_bench.harness.machine import LoadMeter
from mlsys_bench.orca.paper import (
    PAPERS_LATENCY_S,
    PAPERS_RATIO,
    PAPERS_SLOWDOWN,
    Case,
    Crossing,
    Curve,
    crossing,
    paper_workload,
)

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_orca.loading.loaded import LoadedModel


SCALE = 0.125  # of the paper's lengths, for a small model on a small machine
_SIMULATED = (
    "Simulated in virtual time: GPT-3 175B in fp16 on 16 A100-40GB, two pipeline stages of 8 GPUs, {slots:,} K/V "
    "slots; {num} requests for each run. The scheduler and the loop are those that serve; an iteration takes what "
    "a roofline from published peaks says, with nothing fitted. Both schedulings run on the same engine, "
    "which isolates the scheduling; the paper's baseline has an engine of its own, up to 47 % slower at 175B, "
    "so the ratio is given for that too."
)


def run(
    context: BenchContext,
    *,
    backend: str = "",
    model: str = "",
    dtype: str | None = None,
    scale: float = SCALE,
    requests: int = 0,
) -> Section:
    """Replay the evaluation.

    Args:
        context: The suite's context.
        backend: ``simulated`` for the paper's cluster in virtual time, ``engine`` for a real model; empty: the former
            when quick.
        model: A name, a GGUF file or a folder; empty: the default model.
        dtype: As ``mlsys orca serve`` takes it.
        scale: The real engine's lengths, as a share of the paper's.
        requests: Of each run; 0: fewer when quick, and more in virtual time.
    """
    if backend not in ("", "simulated", "engine"):
        raise InvalidInputError(f"backend is {backend!r}: write simulated or engine")
    if backend == "simulated" or (not backend and context.is_quick):
        return run_simulated(context, num_requests=requests or (60 if context.is_quick else 300))
    from mlsys_orca.loading.named import DEFAULT_MODEL, load

    loaded = load(model or DEFAULT_MODEL, dtype, device=context.device)
    return run_engine(loaded, context, scale=scale, num_requests=requests or (16 if context.is_quick else 60))


def run_simulated(context: BenchContext, *, num_requests: int) -> Section:
    """Run on the paper's cluster, at the paper's lengths."""
    from mlsys_core.plugins import installed_plugins

    from mlsys_bench.orca import paper_simulated as simulated

    cluster, registry, curves = simulated.Cluster(), installed_plugins().registry, []
    alone_s, workload = simulated.alone_s(cluster), paper_workload(scale=1, num_requests=num_requests)
    for case in simulated.CASES:
        with context.console.status(f"{case.label} ..."):
            curves.append(
                simulated.simulate_curve(case, workload, cluster, latency_s=PAPERS_LATENCY_S, registry=registry)
            )
    return report(
        _SIMULATED.format(slots=cluster.num_kv_tokens, num=num_requests),
        curves,
        latencies_s={"the paper's": PAPERS_LATENCY_S, "twice that of a request alone here": 2 * alone_s},
        baseline_slowdown=PAPERS_SLOWDOWN,
        data={"backend": "simulated", "num_requests": num_requests, "alone_s": alone_s},
    )


def run_engine(loaded: LoadedModel, context: BenchContext, *, scale: float, num_requests: int) -> Section:
    """Run on the real engine, lengths times ``scale``; Ctrl-C ends it with what was measured."""
    from mlsys_bench.orca import paper_engine as engine

    cases = engine.QUICK_CASES if context.is_quick else engine.CASES
    loads = engine.QUICK_LOADS if context.is_quick else engine.LOADS
    points: dict[Case, list[LoadPoint]] = {case: [] for case in cases}
    notes: list[str] = []
    expected: dict[int, tuple[int, ...]] = {}
    num_ties, num_wrong, alone_s = 0, 0, None
    with LoadMeter() as meter:
        try:
            alone_s = engine.alone_s(loaded, context, scale=scale)
            workload = paper_workload(scale=scale, num_requests=num_requests)
            for case in cases:
                for point, comparison, was_cut in engine.measure_case(
                    loaded, case, workload, context, loads=loads, expected=expected
                ):
                    num_wrong += comparison.num_wrong
                    num_ties += len(comparison.differences) - comparison.num_wrong
                    if was_cut:
                        raise KeyboardInterrupt
                    if not comparison.num_wrong:
                        points[case].append(point)
        except KeyboardInterrupt:
            notes.append("Interrupted: what was measured until then.")
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    answers = f"{num_wrong} WRONG" if num_wrong else f"the same from every case, {num_ties} parting at a tie"
    notes.append(f"{meter.load} Answers: {answers}.")
    return report(
        f"{loaded.name} in {dtype}, {context.num_threads} threads, the paper's lengths times {scale:g}, {num_requests} "
        "requests for each run, at shares of what each case does all at once. Both schedulings run on this "
        "engine.",
        [Curve(case, tuple(own)) for case, own in points.items() if own],
        latencies_s={} if alone_s is None else {"twice that of a request alone": 2 * alone_s},
        notes=notes,
        is_wrong=num_wrong > 0,
        data={
            "backend": "engine",
            "model": loaded.name,
            "dtype": dtype,
            "num_threads": context.num_threads,
            "scale": scale,
            "num_requests": num_requests,
            "alone_s": alone_s,
            "num_ties": num_ties,
            "num_wrong": num_wrong,
        },
    )


_PAPER = (
    f"The paper: {PAPERS_RATIO}x (6.81 over 0.185 req/s at {PAPERS_LATENCY_S * 1e3:.0f} ms), 175B on 16 GPUs, "
    "FasterTransformer as the baseline."
)


def report(
    method: str,
    curves: Sequence[Curve],
    *,
    latencies_s: Mapping[str, float],
    notes: Sequence[str] = (),
    baseline_slowdown: float | None = None,
    is_wrong: bool = False,
    data: Mapping[str, Any],
) -> Section:
    """Return the page's section.

    Args:
        method: Description of the measurement.
        curves: Of all cases.
        latencies_s: Where the ratio is read: what the latency is -> median normalised latency, seconds per token.
        notes: More to say, a paragraph each.
        baseline_slowdown: Read the ratios again as if the baseline's iterations took this many times as long.
        is_wrong: True if answers differed: the section has failed then.
        data: More for machines.
    """
    crossings = {what: crossing(curves, latency_s) for what, latency_s in latencies_s.items()}
    if baseline_slowdown is not None:
        crossings |= {
            f"{what}, the baseline's iterations {baseline_slowdown:g} times as long": crossing(
                curves, latency_s, baseline_slowdown=baseline_slowdown
            )
            for what, latency_s in latencies_s.items()
        }
    body: list[str | Table] = [method, *notes]
    if curves:
        body += [_table(curves), *(_sentence(what, each) for what, each in crossings.items()), _PAPER]
    record = {
        **data,
        "crossings": {what: {**asdict(each), "ratio": each.ratio} for what, each in crossings.items()},
        "paper": {"ratio": PAPERS_RATIO, "latency_s": PAPERS_LATENCY_S},
        "heterogeneous": {curve.case.label: [_record(point) for point in curve.points] for curve in curves},
    }
    return Section("Orca: the paper's evaluation", body, status="failed" if is_wrong else "ok", data=record)


def _sentence(what: str, at: Crossing) -> str:
    where = f"At a median normalised latency of {at.latency_s * 1e3:.3g} ms ({what}): "
    parts = [
        f"{name} {'no run that fast' if best is None else f'{best[1]:.3g} req/s with {best[0]}'}"
        for name, best in (("iteration-level", at.orca), ("request-level", at.request_level))
    ]
    return where + "; ".join(parts) + ("." if at.ratio is None else f"; {at.ratio:.1f}x.")


def _table(curves: Sequence[Curve]) -> Table:
    rows = []
    for curve in curves:
        for point in curve.points:
            assert point.normalized_latency is not None
            offered = "-" if point.offered_rps is None else f"{point.offered_rps:.3g}"
            latency = f"{point.normalized_latency.p50 * 1e3:.4g}"
            rows.append([curve.case.label, offered, f"{point.throughput_rps:.3g}", latency])
    return Table(("case", "offered req/s", "done req/s", "median ms/token"), rows)


def _record(point: LoadPoint) -> dict[str, Any]:
    normalized = point.normalized_latency
    return {
        "offered_rps": point.offered_rps,
        "throughput_rps": point.throughput_rps,
        "median_latency_s": point.latency.p50,
        "median_normalized_latency_s": None if normalized is None else normalized.p50,
    }
