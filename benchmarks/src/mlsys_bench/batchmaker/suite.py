"""The suite ``batchmaker``: the paper's figures of latency over load, one function each (BatchMaker, section 7)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from mlsys_batchmaker.models.sequence import lstm_model, seq2seq_model
from mlsys_batchmaker.models.store import batch_sizes
from mlsys_batchmaker.models.tree import tree_model
from mlsys_batchmaker.replay import systems
from mlsys_batchmaker.replay.trace import Request, Run, poisson_arrivals
from mlsys_batchmaker.replay.trace import run as serve
from mlsys_core.errors import InvalidInputError
from mlsys_core.report import Section, Table

from mlsys_bench.batchmaker import baselines, workloads

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

INF = float("inf")


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the experiments."""

    hidden: int
    num_requests: int
    loads: tuple[float, ...]  # parts of the strong baseline's peak
    vocabulary: int  # of sequence to sequence
    max_batches: tuple[int, ...]  # of figure 7


QUICK = Scale(256, 120, (0.3, 0.5, 0.7, 0.9), 300, (64,))
FULL = Scale(1024, 1000, (0.1, 0.3, 0.5, 0.7, 0.9, 1.0, 1.1, 1.3), 30_000, (512, 64))


@dataclass(frozen=True, slots=True)
class Shown:
    """A figure's part of the report."""

    title: str
    items: tuple[str | Table, ...]
    data: Mapping[str, object]


def sweep(
    cases: Mapping[str, systems.Make], requests: Sequence[Request], rates: Sequence[float], *, seed: int = 0
) -> dict[str, list[Run]]:
    """Run every case at every rate, taking turns; outputs are compared first.

    Raises:
        MlsysError: outputs differ.
    """
    runs: dict[str, list[Run]] = {name: [] for name in cases}
    for number, rate in enumerate(rates):
        arrivals = poisson_arrivals(len(requests), rate, seed + number)
        order = list(cases.items())
        for name, make in order if number % 2 == 0 else reversed(order):
            runs[name].append(serve(name, make, requests, arrivals))
        workloads.require_equal([each[-1] for each in runs.values()])
    return runs


def lstm_cases(scale: Scale, max_batch: int) -> dict[str, systems.Make]:
    """Return BatchMaker in both forms, and the baselines of a sequence encoder."""
    model = lstm_model(num_words=workloads.NUM_WORDS, hidden_size=scale.hidden, batch_sizes=batch_sizes(max_batch))
    common: dict[str, Any] = {"max_batch": max_batch, "length": baselines.num_words}
    return {
        "cellular, chunk": systems.cellular(model, executor="chunk"),
        "cellular, cell": systems.cellular(model, executor="cell"),
        "bucketed": systems.request_level(baselines.lstm(model), bucket_width=10, **common),
        "bucketed, nn.LSTM": systems.request_level(baselines.lstm_torch(model), bucket_width=10, **common),
        "unpadded": systems.request_level(baselines.lstm(model, pads=False), bucket_width=None, pads=False, **common),
    }


def figure7(scale: Scale, max_batch: int) -> Shown:
    """Measure latency against load for an LSTM on WMT-like lengths."""
    cases = lstm_cases(scale, max_batch)
    requests = workloads.sentences(scale.num_requests)
    return _compare(f"Figure 7: LSTM, b_max = {max_batch}", cases, requests, scale, ("bucketed", "bucketed, nn.LSTM"))


def figure11(scale: Scale, kind: str) -> Shown:
    """Compare on sentences of equal length, or of at most 50 or 100 words."""
    cases = lstm_cases(scale, 64)
    requests = workloads.sentences(scale.num_requests, kind=kind)
    return _compare(f"Figure 11: LSTM, {kind}", cases, requests, scale, ("bucketed", "bucketed, nn.LSTM"))


def figure13(scale: Scale) -> Shown:
    """Compare sequence to sequence on two workers; encoder and decoder have batch sizes of their own."""
    cases: dict[str, systems.Make] = {}
    for encoder, decoder in ((64, 64), (128, 64)):
        model = seq2seq_model(
            num_words=scale.vocabulary,
            hidden_size=scale.hidden,
            eos=None,
            encoder_batch_sizes=batch_sizes(encoder),
            decoder_batch_sizes=batch_sizes(decoder),
        )
        cases[f"cellular {encoder},{decoder}"] = systems.cellular(model, executor="chunk", workers=2, output="words")
    cases["bucketed"] = systems.request_level(
        baselines.seq2seq(model), max_batch=64, bucket_width=10, length=baselines.num_words, workers=2, pads=False
    )
    requests = workloads.pairs(max(50, scale.num_requests // 3), num_words=scale.vocabulary)
    return _compare("Figure 13: Seq2Seq, two workers", cases, requests, scale, ("bucketed",))


def figure14(scale: Scale, *, identical: bool) -> Shown:
    """Compare TreeLSTM on random trees; or on trees of one shape, with the ideal graph (figure 15)."""
    model = tree_model(num_words=workloads.NUM_WORDS, hidden_size=scale.hidden)
    wide = tree_model(num_words=workloads.NUM_WORDS, hidden_size=scale.hidden, batch_sizes=batch_sizes(512))
    count = max(50, scale.num_requests // 2)
    height = "per height, 64 trees"
    common: dict[str, Any] = {"max_batch": 64, "bucket_width": None, "pads": False, "length": _num_nodes}
    cases = {
        "cellular, chunk": systems.cellular(model, executor="chunk"),
        "cellular, cell": systems.cellular(model, executor="cell"),
        "cellular, chunk, b_max 512": systems.cellular(wide, executor="chunk"),
        height: systems.request_level(baselines.tree_per_height(model), **common),
    }
    if identical:
        cases["ideal"] = systems.request_level(baselines.tree_ideal(model), **common)
        requests = workloads.identical_trees(count)
        return _compare("Figure 15: TreeLSTM, one shape", cases, requests, scale, ("ideal",))
    return _compare("Figure 14: TreeLSTM, random trees", cases, workloads.trees(count), scale, (height,))


def _compare(
    title: str,
    cases: Mapping[str, systems.Make],
    requests: Sequence[Request],
    scale: Scale,
    strong: Sequence[str],
) -> Shown:
    """Run all cases with all requests at once, and at parts of the peak of the best of ``strong``."""
    for make in cases.values():  # first calls allocate and warm up
        serve("warm-up", make, requests[:10], [0.0] * 10)
    at_once = {name: each[0] for name, each in sweep(cases, requests, [INF]).items()}
    best = max(strong, key=lambda name: at_once[name].throughput_rps)
    rates = [part * at_once[best].throughput_rps for part in scale.loads]
    runs = sweep(cases, requests, rates)
    rows = [
        (
            f"{part:.0%}",
            name,
            *(f"{value * 1e3:.2f}" for value in (each.latency.p50, each.latency.p90, each.latency.p99)),
            f"{each.batch:.1f}",
            f"{each.waste:.0%}",
        )
        for place, part in enumerate(scale.loads)
        for name, each in ((name, runs[name][place]) for name in cases)
    ]
    peaks = [
        (name, f"{each.throughput_rps:,.0f}", f"{each.batch:.1f}", f"{each.waste:.0%}")
        for name, each in at_once.items()
    ]
    data = {
        "peaks_rps": {name: each.throughput_rps for name, each in at_once.items()},
        "loads": list(scale.loads),
        "runs": {
            name: [
                {"offered_rps": r.offered_rps, "p50_s": r.latency.p50, "p90_s": r.latency.p90, "p99_s": r.latency.p99}
                for r in each
            ]
            for name, each in runs.items()
        },
    }
    return Shown(
        title,
        (
            Table(("system", "peak (requests/s)", "rows a step", "padding"), peaks, "all requests at once"),
            Table(
                ("load", "system", "p50 (ms)", "p90 (ms)", "p99 (ms)", "rows a step", "padding"),
                rows,
                f"load: part of the peak of '{best}'",
            ),
        ),
        data,
    )


def _num_nodes(request: Request) -> int:
    return 2 * len(request["words"]) - 1


METHOD = (
    "Every batch is computed, with one thread; its CPU time, and that of scheduling, moves a virtual clock by which "
    "requests arrive (Poisson). Cases take turns in one process, and their outputs are compared before their "
    "times. What other work on the machine does to caches and frequency is in the figures."
)
FIGURES = ("7", "11", "13", "14", "15")


def plan(scale: Scale, wanted: Sequence[str]) -> list[tuple[str, Callable[[], Shown]]]:
    """Return the experiments of the figures ``wanted``, by name.

    Raises:
        InvalidInputError: there is no such figure.
    """
    unknown = [each for each in wanted if each not in FIGURES]
    if unknown:
        raise InvalidInputError(f"no figure {', '.join(unknown)}: there are {', '.join(FIGURES)}")
    steps: dict[str, list[tuple[str, Callable[[], Shown]]]] = {
        "7": [(f"LSTM, b_max {size}", partial(figure7, scale, size)) for size in scale.max_batches],
        "11": [(f"LSTM, {kind}", partial(figure11, scale, kind)) for kind in ("fixed24", "clip50", "clip100")],
        "13": [("Seq2Seq, two workers", partial(figure13, scale))],
        "14": [("trees", partial(figure14, scale, identical=False))],
        "15": [("identical trees", partial(figure14, scale, identical=True))],
    }
    return [step for each in wanted for step in steps[each]]


def run(context: BenchContext, *, figures: tuple[str, ...] = FIGURES, hidden: int = 0, requests: int = 0) -> Section:
    """Run the experiments of some figures.

    Args:
        context: The suite's context.
        figures: Of :data:`FIGURES`.
        hidden: Hidden size; 0: 1024, quick 256.
        requests: Of a run; 0: 1000, quick 120.

    Raises:
        InvalidInputError: there is no such figure.
    """
    scale = QUICK if context.is_quick else FULL
    scale = dataclasses.replace(scale, hidden=hidden or scale.hidden, num_requests=requests or scale.num_requests)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    shown: list[Shown] = []
    try:
        for name, step in plan(scale, figures):
            context.console.print(f"[dim]{name} ...[/dim]", highlight=False)
            shown.append(step())
    finally:
        torch.set_num_threads(before)
    load = os.getloadavg()[0]
    notes = [
        METHOD,
        f"h = {scale.hidden}, {scale.num_requests} requests a run; load average of the machine at the end {load:.1f}.",
        "Parse trees, and DyNet beside them: the suite batchmaker-trees.",
    ]
    body = [*notes, *(item for each in shown for item in (each.title, *each.items))]
    return Section("BatchMaker: the paper's figures", body, data={each.title: each.data for each in shown})
