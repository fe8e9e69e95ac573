"""Words to phonemes by g2p-en: cellular batching against bucketing without finished rows, all at once and under load.

As the step of ``mlsys demo``, with more loads and repeats: both run the same loops with one thread, in virtual time
(``mlsys_batchmaker.bench.replay``), take turns, and must give the same phonemes. Prints medians. Run:
``python benchmarks/batchmaker/words.py [--words 300] [--repeats 5] [--output FILE]``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mlsys_batchmaker.bench import replay, systems
from mlsys_batchmaker.cli import demo
from mlsys_batchmaker.models.g2p import encode, g2p_model, word_of
from mlsys_core.config import settings
from mlsys_core.environment import describe_environment
from mlsys_core.models import resolve_model

LOADS = (0.1, 0.3, 0.5, 0.7, 0.9)
PARTS = ("p50", "p90", "p99")


def contestants() -> dict[str, systems.Make]:
    """Return both contestants, on one model."""
    model = g2p_model(resolve_model("g2p-en", settings().cache_dir))
    bucketed = systems.request_level(
        demo.bucketed(model),
        max_batch=64,
        bucket_width=4,
        pads=False,
        length=lambda request: len(encode(word_of(request))),
    )
    return {"cellular": systems.cellular(model, executor="chunk", output="phonemes"), "bucketed": bucketed}


def main() -> int:
    """Print the peaks and the latencies, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="JSON to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    words = demo.real_words(options.words)
    requests = [{"word": np.array([word.encode()], dtype=object)} for word in words]
    makes = contestants()

    def turns(rate: float, seed: int) -> dict[str, replay.Run]:
        arrivals = replay.poisson_arrivals(len(requests), rate, seed)
        runs = {
            name: replay.run(name, make, requests, arrivals, num_compared=len(requests)) for name, make in makes.items()
        }
        demo.require_equal_phonemes(words, runs["cellular"], runs["bucketed"])
        return runs

    turns(float("inf"), 0)  # allocates and warms up
    at_once = [turns(float("inf"), seed) for seed in range(options.repeats)]
    peaks = {name: [runs[name].throughput_rps for runs in at_once] for name in makes}
    report: dict[str, Any] = {"words": len(words), "words_per_s": peaks, "latency_s": {}}
    middle = {name: float(np.median(each)) for name, each in peaks.items()}
    ratio = float(np.median(np.divide(peaks["cellular"], peaks["bucketed"])))
    print(f"{len(words)} words at once: cellular {middle['cellular']:,.0f} words/s, bucketed {middle['bucketed']:,.0f}")
    print(
        f"(the median of {options.repeats} turns: {ratio:.2f} times)\n\nload, of bucketing's peak: p50, p90, p99 in ms"
    )
    for load in LOADS:
        runs = [turns(load * middle["bucketed"], seed) for seed in range(options.repeats)]
        found = {
            name: {part: float(np.median([getattr(each[name].latency, part) for each in runs])) for part in PARTS}
            for name in makes
        }
        report["latency_s"][load] = found
        shown = [f"{name} " + ", ".join(f"{value * 1e3:.2f}" for value in found[name].values()) for name in makes]
        print(f"{load:4.0%}  " + "   ".join(shown))
    if options.output is not None:
        options.output.write_text(json.dumps({**report, "environment": describe_environment()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
