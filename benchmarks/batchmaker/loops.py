"""Time of a step of the compiled loops by rows: an LSTM with a table of words, one thread, beside ``nn.LSTM``.

The loops compute the hidden half of the product alone (8 h^2 operations a row); ``nn.LSTM`` computes both halves. Best
of several turns. Run: ``python benchmarks/batchmaker/loops.py [--hidden 512] [--output FILE]``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from mlsys_batchmaker.bench import direct
from mlsys_batchmaker.models.sequence import lstm_model
from mlsys_core.environment import describe_environment

ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512)
STEPS = 10
REPEATS = 9


def seconds_a_step(call: Callable[[], object]) -> float:
    """Return the seconds per step: the best of several calls of ``STEPS`` steps, after a warm-up."""
    call()
    found = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return min(found) / STEPS


def main() -> int:
    """Print a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--output", type=Path, help="JSON to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    size: int = options.hidden
    chains = direct.Chains(lstm_model(num_words=100, hidden_size=size).cells[0])
    fused = torch.nn.LSTM(size, size).eval()
    found = {}
    print(f"h = {size}: rows, µs a step, GFLOP/s of the hidden half; nn.LSTM, both halves: µs a step, GFLOP/s")
    for rows in ROWS:
        words, vectors = np.zeros((STEPS, rows), dtype=np.int64), torch.randn(STEPS, rows, size)
        with torch.inference_mode():
            ours = seconds_a_step(lambda words=words: chains.run(words, None, is_fresh=True))  # type: ignore[misc]
            theirs = seconds_a_step(lambda vectors=vectors: fused(vectors))  # type: ignore[misc]
        work = 8e-9 * rows * size * size
        found[rows] = {"loops_s": ours, "nn_lstm_s": theirs}
        print(
            f"{rows:5} {ours * 1e6:9.0f} {work / ours:6.0f}   {theirs * 1e6:9.0f} {2 * work / theirs:6.0f}", flush=True
        )
    if options.output is not None:
        report = {"hidden": size, "steps": found, "environment": describe_environment()}
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
