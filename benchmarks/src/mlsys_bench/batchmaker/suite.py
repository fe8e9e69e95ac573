"""The suite ``batchmaker``: the paper's figures, also ``mlsys batchmaker bench``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_core.report import Section

from mlsys_bench.batchmaker import figures as paper
from mlsys_bench.batchmaker.figures import FULL, QUICK, Scale, Shown

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

METHOD = (
    "Every batch is computed, with one thread; its CPU time, and that of scheduling, moves a virtual clock by which "
    "requests arrive (Poisson). Cases take turns in one process, and their outputs are compared before their "
    "times. What other work on the machine does to caches and frequency is in the figures."
)
FIGURES = ("3", "7", "8", "9", "11", "13", "14", "15")


def plan(scale: Scale, wanted: Sequence[str]) -> list[tuple[str, Callable[[], Shown]]]:
    """Return the experiments of the figures ``wanted``, by name.

    Raises:
        InvalidInputError: there is no such figure.
    """
    unknown = [each for each in wanted if each not in FIGURES]
    if unknown:
        raise InvalidInputError(f"no figure {', '.join(unknown)}: there are {', '.join(FIGURES)}")
    steps: dict[str, list[tuple[str, Callable[[], Shown]]]] = {
        "3": [("knee", partial(paper.figure3, scale))],
        "7": [(f"LSTM, b_max {size}", partial(paper.figure7, scale, size)) for size in scale.max_batches],
        "8": [("bucket widths", partial(paper.figure8, scale))],
        "9": [("queueing and computing", partial(paper.figure9, scale))],
        "11": [(f"LSTM, {kind}", partial(paper.figure11, scale, kind)) for kind in ("fixed24", "clip50", "clip100")],
        "13": [("Seq2Seq, two workers", partial(paper.figure13, scale))],
        "14": [("trees", partial(paper.figure14, scale, identical=False))],
        "15": [("identical trees", partial(paper.figure14, scale, identical=True))],
    }
    return [step for each in wanted for step in steps[each]]


def run(
    context: BenchContext, *, figures: tuple[str, ...] = FIGURES, hidden: int = 0, requests: int = 0, trees: str = ""
) -> Section:
    """Run the experiments of some figures.

    Args:
        context: The suite's context.
        figures: Of :data:`FIGURES`.
        hidden: Hidden size; 0: 1024, quick 256.
        requests: Of a run; 0: 1000, quick 120.
        trees: A file of parse trees in brackets, one a line, for figure 14; empty: random ones.

    Raises:
        InvalidInputError: there is no such figure.
    """
    scale = dataclasses.replace(QUICK if context.is_quick else FULL, trees=Path(trees) if trees else None)
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
        "DyNet is beside these trees in the suite batchmaker-trees.",
    ]
    body = [*notes, *(item for each in shown for item in (each.title, *each.items))]
    return Section("BatchMaker: the paper's figures", body, data={each.title: each.data for each in shown})
