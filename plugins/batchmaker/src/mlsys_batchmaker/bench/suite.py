"""``mlsys batchmaker bench`` and ``mlsys bench batchmaker``: all figures, one report."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from mlsys_core.bench import BenchContext
from mlsys_core.errors import InvalidInputError
from mlsys_core.report import Section

from mlsys_batchmaker.bench import figures
from mlsys_batchmaker.bench.figures import FULL, QUICK, Scale, Shown

METHOD = (
    "Every batch is computed, with one thread; its CPU time, and that of scheduling, moves a virtual clock by which "
    "requests arrive (Poisson). Contestants take turns in one process, and their outputs are compared before their "
    "times. What other work on the machine does to caches and frequency is in the figures."
)
FIGURES = ("3", "7", "8", "9", "11", "13", "14", "15")


def scale_of(
    *, quick: bool, hidden: int | None = None, requests: int | None = None, trees: Path | None = None
) -> Scale:
    """Return the scale that the options ask for."""
    scale = dataclasses.replace(QUICK if quick else FULL, trees=trees)
    if hidden is not None:
        scale = dataclasses.replace(scale, hidden=hidden)
    return scale if requests is None else dataclasses.replace(scale, num_requests=requests)


def plan(scale: Scale, wanted: Sequence[str]) -> list[tuple[str, Callable[[], Shown]]]:
    """Return the experiments of the figures ``wanted``, by name.

    Raises:
        InvalidInputError: there is no such figure.
    """
    unknown = [each for each in wanted if each not in FIGURES]
    if unknown:
        raise InvalidInputError(f"no figure {', '.join(unknown)}: there are {', '.join(FIGURES)}")
    steps: dict[str, list[tuple[str, Callable[[], Shown]]]] = {
        "3": [("knee", partial(figures.figure3, scale))],
        "7": [(f"LSTM, b_max {size}", partial(figures.figure7, scale, size)) for size in scale.max_batches],
        "8": [("bucket widths", partial(figures.figure8, scale))],
        "9": [("queueing and computing", partial(figures.figure9, scale))],
        "11": [(f"LSTM, {kind}", partial(figures.figure11, scale, kind)) for kind in ("fixed24", "clip50", "clip100")],
        "13": [("Seq2Seq, two workers", partial(figures.figure13, scale))],
        "14": [("trees", partial(figures.figure14, scale, identical=False))],
        "15": [("identical trees", partial(figures.figure14, scale, identical=True))],
    }
    return [step for each in wanted for step in steps[each]]


def run_figures(context: BenchContext, scale: Scale, wanted: Sequence[str] = FIGURES) -> Section:
    """Run the experiments and make the section."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    shown: list[Shown] = []
    try:
        for name, step in plan(scale, wanted):
            context.console.print(f"[dim]{name} ...[/dim]", highlight=False)
            shown.append(step())
    finally:
        torch.set_num_threads(before)
    load = os.getloadavg()[0]
    notes = [
        METHOD,
        f"h = {scale.hidden}, {scale.num_requests} requests a run; load average of the machine at the end {load:.1f}.",
    ]
    if importlib.util.find_spec("dynet") is None:
        notes.append("DyNet (pip install dyNET38) is not installed, so it is missing among the trees.")
    body = [*notes, *(item for each in shown for item in (each.title, *each.items))]
    return Section("BatchMaker: the paper's figures", body, data={each.title: each.data for each in shown})


def run(context: BenchContext) -> Section:
    """Run the suite of ``mlsys bench batchmaker``."""
    return run_figures(context, scale_of(quick=context.is_quick))
