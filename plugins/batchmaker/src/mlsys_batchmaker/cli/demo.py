"""BatchMaker's step of ``mlsys demo``: 300 words to phonemes under load, cellular against bucketed batching.

The model is g2p-en with its trained weights. Both ways run the same cells with one thread on the same arrivals in
virtual time (:mod:`mlsys_batchmaker.replay.trace`); the phonemes are compared before the times.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from mlsys_batchmaker.models.g2p import MAX_PHONEMES, PHONEMES, encode, g2p_model, word_of
from mlsys_batchmaker.models.model import Model
from mlsys_batchmaker.replay import systems, trace
from mlsys_core.config import settings
from mlsys_core.models import resolve_model
from mlsys_core.report import Figure, Section, Story, Table

if TYPE_CHECKING:
    from mlsys_core.demo import DemoContext

NUM_WORDS = 300
LOADS = (0.3, 0.6, 0.9)
SHOWN = ("cellular", "batching", "recurrent", "scheduler")


def run(context: DemoContext) -> Section:
    """Load the model, say some words, serve 300 both ways, draw.

    Raises:
        MissingDependencyError: the wheel g2p-en is not installed.
        MlsysError: the two ways give different phonemes.
    """
    from mlsys_core.plot import latency_vs_load, to_svg

    started = time.perf_counter()
    model = g2p_model(resolve_model("g2p-en", settings().cache_dir))
    words = real_words(NUM_WORDS)
    requests = [{"word": np.array([word.encode()], dtype=object)} for word in words]
    makes = systems_on(model)
    before = torch.get_num_threads()
    try:
        for make in makes.values():
            trace.run("warm-up", make, requests[:10], [0.0] * 10)
        at_once = trace.run("bucketed", makes["bucketed"], requests, [0.0] * len(requests))
        runs: dict[str, list[trace.Run]] = {name: [] for name in makes}
        for number, load in enumerate(LOADS):
            arrivals = trace.poisson_arrivals(len(requests), load * at_once.throughput_rps, number)
            for name, make in makes.items():
                runs[name].append(trace.run(name, make, requests, arrivals, num_compared=len(requests)))
            require_equal_phonemes(words, runs["cellular"][-1], runs["bucketed"][-1])
    finally:
        torch.set_num_threads(before)
    said = {word: _phonemes(runs["cellular"][0].outputs[index]) for index, word in enumerate(words)}
    for word in [each for each in SHOWN if each in said]:
        context.console.print(f"  {word:12} {said[word]}", highlight=False)
    rows = []
    for number, load in enumerate(LOADS):
        for name in makes:
            latency = runs[name][number].latency
            times = [f"{value * 1e3:.1f}" for value in (latency.p50, latency.p90, latency.p99)]
            rows.append((f"{load:.0%}", name, *times))
    table = Table(("load", "batching", "p50 (ms)", "p90 (ms)", "p99 (ms)"), rows, "load: part of bucketing's peak")
    for part, name, *figures in rows:
        context.console.print(f"  {part:>4} {name:9} p50, p90, p99: {', '.join(figures)} ms", highlight=False)
    figure = latency_vs_load({name: [each.point() for each in runs_of] for name, runs_of in runs.items()})
    return Section(
        "BatchMaker: words to phonemes, cell by cell",
        [
            Story(
                f"{NUM_WORDS} English words, arriving at random, were spelled as phonemes by g2p-en's GRU encoder and "
                "decoder with the trained weights, one thread. Both ways gave the same phonemes for every word.",
                "A recurrent network runs one small cell again and again. Batching whole words makes a new word wait"
                " until the batch before it has ended; BatchMaker lets it join at the next cell and leave with its "
                "last phoneme.",
                "Latency over load: lower is better. At 100 % bucketing can do no more. The table has the median, and "
                "the times that 10 % and 1 % of the words exceed.",
                "Bucketing by length is what most serving code does; here it runs the same compiled loops and pads "
                f"nothing. {verdict(rows)}",
            ),
            Table(("word", "phonemes"), [(word, said[word]) for word in words[:12]]),
            table,
            Figure(to_svg(figure)),
        ],
        data={
            "latency_s": {name: [vars_of(each) for each in runs_of] for name, runs_of in runs.items()},
            "seconds": round(time.perf_counter() - started, 1),
        },
    )


def verdict(rows: Sequence[Sequence[str]]) -> str:
    """Return who was quicker at each load, by the 90th percentile.

    Example:
        >>> rows = [("30%", "cellular", "1.0", "2.0", "3.0"), ("30%", "bucketed", "2.0", "4.0", "5.0")]
        >>> verdict([*rows, ("90%", "cellular", "1.0", "9.0", "9.0"), ("90%", "bucketed", "1.0", "6.0", "9.0")])
        'p90 of cells over that of buckets: 0.50 at 30% load, 1.50 at 90% load. Buckets win at 90%.'
    """
    p90 = {(load, name): float(figures[1]) for load, name, *figures in rows}
    ratios = {load: p90[load, "cellular"] / max(p90[load, "bucketed"], 1e-9) for load, _ in p90}
    lost = [load for load, ratio in ratios.items() if ratio > 1]
    end = f"Buckets win at {', '.join(lost)}." if lost else "Cells win at each load."
    said = ", ".join(f"{ratio:.2f} at {load} load" for load, ratio in ratios.items())
    return f"p90 of cells over that of buckets: {said}. {end}"


def systems_on(model: Model) -> dict[str, systems.Make]:
    """Return cellular batching of words, and bucketing on the same compiled loops."""
    bucketing = systems.request_level(
        bucketed(model),
        max_batch=64,
        bucket_width=4,
        pads=False,
        length=lambda request: len(encode(word_of(request))),
    )
    return {"cellular": systems.cellular(model, executor="chunk", output="phonemes"), "bucketed": bucketing}


def vars_of(run: trace.Run) -> dict[str, float]:
    """Return a run's figures as plain numbers."""
    return {
        "offered_rps": run.offered_rps,
        "p50": run.latency.p50,
        "p90": run.latency.p90,
        "p99": run.latency.p99,
    }


def real_words(count: int) -> list[str]:
    """Return different English words out of the docstrings of Python's own library, in a fixed random order."""
    import argparse
    import asyncio
    import json
    import logging

    found: dict[str, None] = dict.fromkeys(SHOWN)
    for module in (argparse, asyncio, json, logging):
        for word in re.findall(r"\b[a-z]{3,14}\b", Path(str(module.__file__)).read_text().lower()):
            found[word] = None
    rest = sorted(set(found) - set(SHOWN))
    order = np.random.default_rng(0).permutation(len(rest))
    return [*SHOWN, *(rest[index] for index in order)][:count]


def bucketed(model: Model) -> Callable[[], systems.Compute]:
    """Return a maker for words of one bucket: the encoder, then the decoder until every word has ended.

    Both run on the same compiled loops.

    Rows drop out at the end of their letters and of their phonemes, so nothing is computed for padding.
    """
    end = PHONEMES.index("</s>")

    def make() -> systems.Compute:
        encoder = systems.Chains(model.cells[0])
        decoder = systems.Chains(model.cells[1], {"h": encoder.banks["h"]})

        def compute(requests: Sequence[trace.Request], _: int) -> Sequence[np.ndarray]:
            letters = [encode(word_of(request)) for request in requests]
            lengths = np.array([len(each) for each in letters])
            table = np.zeros((int(lengths.max()), len(requests)), dtype=np.int64)
            for column, each in enumerate(letters):
                table[: len(each), column] = each
            encoder.run(table, lengths, is_fresh=True)
            said = systems.decode(decoder, len(requests), MAX_PHONEMES, PHONEMES.index("<s>"))
            return [_names(row.tolist(), end) for row in said]

        return compute

    return make


def require_equal_phonemes(words: Sequence[str], ours: trace.Run, theirs: trace.Run) -> None:
    """Check that both ways gave the same.

    Raises:
        MlsysError: they differ.
    """
    from mlsys_core.errors import MlsysError

    for index, word in enumerate(words):
        if ours.outputs[index].tolist() != theirs.outputs[index].tolist():
            raise MlsysError(f"{word!r}: cellular and bucketed batching give different phonemes")


def _names(numbers: list[int], end: int) -> np.ndarray:
    until = numbers.index(end) if end in numbers else len(numbers)
    return np.array([PHONEMES[number].encode() for number in numbers[:until]], dtype=object)


def _phonemes(output: np.ndarray) -> str:
    return " ".join(part.decode() for part in output)
