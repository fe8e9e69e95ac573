"""The suite ``dvabatch``: the paper's Figures 14, 16 and 18, and peaks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from mlsys_core.bench import BenchContext
from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError, MissingDependencyError
from mlsys_core.report import Section, Table
from mlsys_dvabatch.scheduling.policies.planner import TASK_S

from mlsys_bench.dvabatch import encoder, vision
from mlsys_bench.dvabatch.cases import Outcome
from mlsys_bench.dvabatch.workloads import GLUE_LIKE

_NOTE = (
    "One core. Encoder: every batch of every case is run, its answers compared, and it takes the processor time "
    "that it took, in virtual time with Poisson arrivals. Vision models: stages are measured so at each batch size, "
    "and the schedulers that serve run on those costs; every task, of a stage or of a whole batch, costs "
    f"{TASK_S * 1e6:.0f} us more, for loop and threads. Loads of vision models are parts of what batches of the best "
    "size can do."
)
PARTS = ("all", "encoder", "vision")
Body = list[str | Table]


def run(context: BenchContext, *, part: str = "all", lengths: tuple[str, ...] = ()) -> Section:
    """Run the suite, or a part of it; see :mod:`mlsys_core.bench`.

    Args:
        context: where it prints and how long it may take.
        part: of :data:`PARTS`.
        lengths: of the encoder's texts, names of :data:`GLUE_LIKE`; none: all, or two if it is to be quick.

    Raises:
        InvalidInputError: there is no such part, or no such lengths.
    """
    if part not in PARTS:
        raise InvalidInputError(f"part={part}: give one of {', '.join(PARTS)}")
    for name in lengths:
        if name not in GLUE_LIKE:
            raise InvalidInputError(f"lengths={name}: give some of {','.join(GLUE_LIKE)}, with commas")
    lengths = lengths or (("RTE", "SST-2") if context.is_quick else tuple(GLUE_LIKE))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        body: Body = [_NOTE, f"Load average when it began: {os.getloadavg()[0]:.1f}."]
        data: dict[str, object] = {"load_average": os.getloadavg()[0]}
        if part in ("all", "vision"):
            _vision(context, body, data)
        if part in ("all", "encoder"):
            _encoder(context, body, data, lengths)
    finally:
        torch.set_num_threads(threads)
    return Section("DVABatch", body, data=data)


def _encoder(context: BenchContext, body: Body, data: dict[str, object], workloads: Sequence[str]) -> None:
    try:
        bench = encoder.EncoderBench(settings().cache_dir, is_quick=context.is_quick)
    except MissingDependencyError as error:
        body.append(f"Encoder: missing. {error}")
        return
    num = 96
    by_workload = {}
    for workload in workloads:
        context.console.print(f"{bench.name}, lengths like {workload}")
        by_workload[workload] = encoder.peaks(bench, workload, num)
    if by_workload:
        body.append(encoder.peak_table(by_workload))
    data["lengths"] = {w: asdict(GLUE_LIKE[w]) for w in workloads}
    data["encoder_peak_rps"] = {w: {o.case: o.throughput_rps for o in all_} for w, all_ in by_workload.items()}
    case = "Policy I, cost-aware"
    for workload, found in by_workload.items():
        peak = next(outcome for outcome in found if outcome.case == case).throughput_rps
        for load in (0.25, 0.6, 0.9) if not context.is_quick and workload == "RTE" else (0.6,):
            context.console.print(f"{bench.name}, lengths like {workload}, load {load:g} of {case}'s peak")
            num = 120 if context.is_quick or load != 0.6 else 240
            outcomes = encoder.at_load(bench, workload, num, load=load, peak_rps=peak)
            caption = f"{bench.name}, lengths like {workload}, load {load:g} of {case}'s peak, {load * peak:.1f} req/s"
            caption += f", {num} requests"
            body.append(_latencies(f"{caption} (Figures 14, 16)", outcomes))
            data[f"encoder_latency_{workload}_at_{load:g}_of_{case}"] = _figures(outcomes)


def _vision(context: BenchContext, body: Body, data: dict[str, object]) -> None:
    num = 800 if context.is_quick else 1200
    for name in ["unet", "linknet", "vgg19-weights"] + ([] if context.is_quick else ["vgg19", "resnet152"]):
        context.console.print(f"{name}: slicing and measuring")
        bench = vision.measure_model(name, is_quick=context.is_quick)
        window_s = vision.tuned_window_s(bench, num)
        rows: list[list[str]] = []
        for load in (0.25, 0.6, 0.9):
            outcomes = vision.at_load(bench, load, num=num, window_s=window_s)
            rows += [[f"{load:g}", *_row(outcome, outcomes)] for outcome in outcomes]
            data[f"{name}_at_{load:g}"] = _figures(outcomes)
        body.append(Table(["load", *_HEADERS], rows, f"{name}, 4 stages (Figures 14, 16, 18)"))


_HEADERS = ("case", "average (ms)", "p99 (ms)", "to ZeroBatch", "to best static", "new / stretch / split")


def _row(outcome: Outcome, outcomes: list[Outcome]) -> list[str]:
    zero, best = outcomes[0].mean_s, outcomes[2].mean_s
    counts = [str(outcome.operations.get(name, 0)) for name in ("new", "stretch", "split")]
    return [
        outcome.case if outcome is not outcomes[2] else f"best static ({outcome.case})",
        f"{outcome.mean_s * 1e3:.1f}",
        f"{outcome.p99_s * 1e3:.1f}",
        f"{outcome.mean_s / zero:.2f}x",
        f"{outcome.mean_s / best:.2f}x",
        " / ".join(counts) if "new" in outcome.operations else "",
    ]


def _latencies(caption: str, outcomes: list[Outcome]) -> Table:
    zero = outcomes[0].mean_s
    rows = [[o.case, f"{o.mean_s * 1e3:.1f}", f"{o.p99_s * 1e3:.1f}", f"{o.mean_s / zero:.2f}x"] for o in outcomes]
    return Table(["case", "average (ms)", "p99 (ms)", "to ZeroBatch"], rows, caption)


def _figures(outcomes: list[Outcome]) -> dict[str, Any]:
    return {o.case: {"mean_s": o.mean_s, "p99_s": o.p99_s, "rps": o.throughput_rps, **o.operations} for o in outcomes}
