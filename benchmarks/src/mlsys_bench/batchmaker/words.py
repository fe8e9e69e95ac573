"""The suite ``batchmaker-words``: words to phonemes by g2p-en, cellular against bucketed batching, at several loads.

As the step of ``mlsys demo``, with more loads and repeats: both run the same loops with one thread, in virtual time,
take turns, and must give the same phonemes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from mlsys_batchmaker.cli import demo
from mlsys_batchmaker.models.g2p import g2p_model
from mlsys_batchmaker.replay import trace
from mlsys_core.config import settings
from mlsys_core.models import resolve_model
from mlsys_core.report import Section, Table

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

LOADS = (0.1, 0.3, 0.5, 0.7, 0.9)  # of bucketing's peak
PARTS = ("p50", "p90", "p99")


def run(context: BenchContext, *, words: int = 300, repeats: int = 5) -> Section:
    """Serve the words at once, then at each load; medians over repeats.

    Args:
        context: The suite's context; quick has 60 words and one repeat.
        words: Number of words.
        repeats: Turns at each load.

    Raises:
        MissingDependencyError: the wheel g2p-en is not installed.
        MlsysError: the two give different phonemes.
    """
    words, repeats = (60, 1) if context.is_quick else (words, repeats)
    torch.set_num_threads(1)
    spoken = demo.real_words(words)
    requests = [{"word": np.array([word.encode()], dtype=object)} for word in spoken]
    makes = demo.systems_on(g2p_model(resolve_model("g2p-en", settings().cache_dir)))

    def turns(rate: float, seed: int) -> dict[str, trace.Run]:
        arrivals = trace.poisson_arrivals(len(requests), rate, seed)
        runs = {name: trace.run(name, make, requests, arrivals, num_compared=words) for name, make in makes.items()}
        demo.require_equal_phonemes(spoken, runs["cellular"], runs["bucketed"])
        return runs

    turns(float("inf"), 0)  # allocates and warms up
    at_once = [turns(float("inf"), seed) for seed in range(repeats)]
    peaks = {name: [runs[name].throughput_rps for runs in at_once] for name in makes}
    middle = {name: float(np.median(each)) for name, each in peaks.items()}
    latency_s: dict[str, Any] = {}
    rows = []
    for load in LOADS:
        runs = [turns(load * middle["bucketed"], seed) for seed in range(repeats)]
        found = {
            name: {part: float(np.median([getattr(each[name].latency, part) for each in runs])) for part in PARTS}
            for name in makes
        }
        latency_s[str(load)] = found
        rows += [[f"{load:.0%}", name, *(f"{found[name][part] * 1e3:.2f}" for part in PARTS)] for name in makes]
    body = [
        Table(["case", "words/s"], [[name, f"{rate:,.0f}"] for name, rate in middle.items()], f"{words} words at once"),
        Table(["load", "case", *(f"{part}, ms" for part in PARTS)], rows, "Loads as parts of bucketing's peak"),
    ]
    data = {"words": words, "words_per_s": peaks, "latency_s": latency_s}
    return Section("BatchMaker: words to phonemes", body, data=data)
