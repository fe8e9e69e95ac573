"""The suite ``dvabatch``: the paper's Figures 14 to 21."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import torch
from mlsys_core.bench import BenchContext
from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError, MissingDependencyError
from mlsys_core.report import Section, Table
from mlsys_dvabatch.scheduling.policies.planner import TASK_S
from mlsys_dvabatch.stages.profile import profile_operators

from mlsys_bench.dvabatch import encoder, vision
from mlsys_bench.dvabatch.cases import Outcome
from mlsys_bench.dvabatch.stepping import record
from mlsys_bench.dvabatch.workloads import GLUE_LIKE

_NOTE = (
    "One core. Encoder: every batch of every case is run, its answers compared, and it takes the processor time "
    "that it took, in virtual time with Poisson arrivals. Vision models: stages are measured so at each batch size, "
    "and the schedulers that serve run on those costs; every task, of a stage or of a whole batch, costs "
    f"{TASK_S * 1e6:.0f} us more, for loop and threads. Loads of vision models are parts of what batches of the best "
    "size can do."
)
PARTS = ("all", "encoder", "vision", "stepping")
Body = list[str | Table]


def run(context: BenchContext, *, part: str = "all", lengths: tuple[str, ...] = ()) -> Section:
    """Run the suite, or a part of it; see :mod:`mlsys_core.bench`.

    Args:
        context: where it prints and how long it may take.
        part: of :data:`PARTS`; "stepping" is the rising load alone.
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
        if part == "stepping":
            _stepping(context, body, data, lengths)
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
    data["lengths"] = {w: GLUE_LIKE[w].described() for w in workloads}
    data["encoder_peak_rps"] = {w: {o.case: o.throughput_rps for o in all_} for w, all_ in by_workload.items()}
    for case, workload in itertools.product(("DelayBatch", "Policy I, cost-aware"), by_workload):
        peak = next(outcome for outcome in by_workload[workload] if outcome.case == case).throughput_rps
        is_full = not context.is_quick and workload == "RTE" and case != "DelayBatch"
        for load in (0.25, 0.6, 0.9) if is_full else (0.6,):
            context.console.print(f"{bench.name}, lengths like {workload}, load {load:g} of {case}'s peak")
            num = 120 if context.is_quick or load != 0.6 else 240
            outcomes = encoder.at_load(bench, workload, num, load=load, peak_rps=peak)
            caption = f"{bench.name}, lengths like {workload}, load {load:g} of {case}'s peak, {load * peak:.1f} req/s"
            caption += f", {num} requests"
            body.append(_latencies(f"{caption} (Figures 14, 16)", outcomes))
            data[f"encoder_latency_{workload}_at_{load:g}_of_{case}"] = _figures(outcomes)


def _vision(context: BenchContext, body: Body, data: dict[str, object]) -> None:
    names = _nets(context)
    num = 800 if context.is_quick else 1200
    pairs, rising, stages = {}, {}, {}
    for name in names:
        context.console.print(f"{name}: slicing and measuring")
        bench = vision.measure_model(name, is_quick=context.is_quick)
        window_s = vision.tuned_window_s(bench, num)
        rows: list[list[str]] = []
        for load in (0.25, 0.6, 0.9):
            outcomes = vision.at_load(bench, load, num=num, window_s=window_s)
            rows += [[f"{load:g}", *_row(outcome, outcomes)] for outcome in outcomes]
            data[f"{name}_at_{load:g}"] = _figures(outcomes)
        body.append(Table(["load", *_HEADERS], rows, f"{name}, 4 stages (Figures 14, 16, 18)"))
        pairs[name] = vision.buffer_pairs(bench, num=num)
        qos_s = vision.qos_s(bench.costs)
        runs = vision.stepping(bench, window_s, num_per_step=num // 3)
        rising[name] = record(runs, qos_s)
        if name in ("linknet", "resnet152"):
            sizes = (1, 4, 16) if context.is_quick else (1, 4, 16, 64)
            operators = profile_operators(bench.program, batch_sizes=sizes)
            stages[name] = vision.stage_counts(bench, operators, num=num)
    body.append(_by_number("buffer pairs", pairs, "Average latency at load 0.9, ms, Policy III (Figure 19)"))
    body.append(_by_number("stages", stages, "Average latency at load 0.9, ms (Figure 20)"))
    body.append(_highest(rising))
    data.update(buffer_pairs=_text_keys(pairs), stages=_text_keys(stages), stepping=rising)


def _nets(context: BenchContext) -> list[str]:
    return ["unet", "linknet", "vgg19-weights"] + ([] if context.is_quick else ["vgg19", "resnet152"])


def _stepping(context: BenchContext, body: Body, data: dict[str, object], workloads: Sequence[str]) -> None:
    """Run the rising load alone: nets, then the encoder with each set's lengths, all by measured costs."""
    num, rising = 100 if context.is_quick else 400, {}
    for name in _nets(context):
        context.console.print(f"{name}: slicing and measuring")
        bench = vision.measure_model(name, is_quick=context.is_quick)
        qos_s = vision.qos_s(bench.costs)
        runs = vision.stepping(bench, vision.tuned_window_s(bench, num), num_per_step=num)
        rising[name] = record(runs, qos_s)
    try:
        texts = encoder.EncoderBench(settings().cache_dir, is_quick=context.is_quick)
    except MissingDependencyError as error:
        body.append(f"Encoder: missing. {error}")
        workloads = ()
    for workload in workloads:
        name = f"{texts.name}, lengths like {workload}"
        context.console.print(name)
        qos_s, runs = encoder.stepping(texts, workload, num_per_step=num)
        rising[name] = record(runs, qos_s)
    body.append(_highest(rising))
    data["stepping"] = rising


def _highest(rising: dict[str, Any]) -> Table:
    rows = []
    for name, found in rising.items():
        delay, own = (case["highest_rps"] for case in found["cases"].values())
        in_paper = (f"{case['highest_paper_rps']:.0f}" for case in found["cases"].values())
        gain = f"{own / delay:.2f}x" if delay else ""
        rows.append([name, f"{delay:.1f}", f"{own:.1f}", gain, *in_paper, f"{found['qos_s'] * 1e3:.0f}"])
    columns = ["model", "DelayBatch", "DVABatch", "gain", "of 4,000: DelayBatch", "DVABatch", "QoS (ms)"]
    caption = "Highest step of load within the QoS target, req/s, and the step's rate in the paper (Figures 15, 17)"
    return Table(columns, rows, caption)


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


def _by_number(what: str, found: dict[str, dict[int, float]], caption: str) -> Table:
    numbers = sorted({number for row in found.values() for number in row})
    rows = [[name, *(f"{row[n] * 1e3:.1f}" if n in row else "" for n in numbers)] for name, row in found.items()]
    return Table([f"model, {what}:", *map(str, numbers)], rows, caption)


def _text_keys(found: dict[str, dict[int, float]]) -> dict[str, dict[str, float]]:
    return {name: {str(number): value for number, value in row.items()} for name, row in found.items()}
