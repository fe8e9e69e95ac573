"""One worker and two on real threads: requests a second when all are there at once, by the clock on the wall.

Each worker is a thread with one core; the loop's thread and the one that unfolds requests share the cores with them, so
the machine needs two cores that do nothing else. Both take turns, and their answers are compared. The gain of two
threads that only compute, with no scheduler, comes first: cores share caches, memory and power. Run:
``python benchmarks/batchmaker/workers.py [--hidden 1024] [--requests 1000]``.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np
import torch
from mlsys_batchmaker.bench import direct, workloads
from mlsys_batchmaker.bench.replay import Request
from mlsys_batchmaker.engine import Engine, EngineConfig
from mlsys_batchmaker.models.model import Model
from mlsys_batchmaker.models.sequence import lstm_model, seq2seq_model
from mlsys_batchmaker.scheduling.tasks import Round, RoundOutput

REPEATS = 7
VOCABULARY = 300


def bare_loops(model: Model, *, rows: int = 64, steps: int = 20, calls: int = 10) -> float:
    """Return the speed-up of two threads over one for the cell's loops alone."""
    chains = [direct.Chains(model.cells[0]) for _ in range(2)]
    words = np.zeros((steps, rows), dtype=np.int64)

    def work(own: direct.Chains, times: int = calls) -> None:
        for _ in range(times):
            own.run(words, None, is_fresh=True)

    def seconds(threads: Sequence[threading.Thread]) -> float:
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - started

    for own in chains:
        work(own, 2)
    gains = []
    for _ in range(REPEATS):
        one = seconds([threading.Thread(target=work, args=(chains[0],))])
        gains.append(2 * one / seconds([threading.Thread(target=work, args=(own,)) for own in chains]))
    return float(np.median(gains))


class Idle:
    """Waiting time of a worker for its next round while there is work."""

    def __init__(self) -> None:
        self._ended_s: dict[int, float] = {}
        self._gaps_s: list[float] = []

    def note(self, batch: Round, output: RoundOutput) -> None:
        """Record the end of a round."""
        if batch.worker in self._ended_s:
            self._gaps_s.append(output.started_s - self._ended_s[batch.worker])
        self._ended_s[batch.worker] = output.ended_s

    def median_s(self) -> float:
        """Return the median wait over all rounds, in seconds."""
        return float(np.median(self._gaps_s))


def serve(engine: Engine, requests: Sequence[Request]) -> tuple[float, list[np.ndarray]]:
    """Serve ``requests`` after a warm-up; return requests per second and the answers."""
    for future in [engine.submit(request) for request in requests[:20]]:
        future.result()
    started = time.perf_counter()
    futures = [engine.submit(request) for request in requests]
    answers = [next(iter(future.result().outputs.values())) for future in futures]
    return len(requests) / (time.perf_counter() - started), answers


def compare(title: str, model: Model, requests: Sequence[Request]) -> None:
    """Print the gain of two workers."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    idle = {count: Idle() for count in rates}
    engines = {
        count: Engine(model, EngineConfig(num_workers=count, pool_bytes=256 << 20), on_round=idle[count].note)
        for count in rates
    }
    try:
        for _ in range(REPEATS):
            answers = {}
            for count, engine in engines.items():
                rate, answers[count] = serve(engine, requests)
                rates[count].append(rate)
            for ours, theirs in zip(answers[1], answers[2], strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-3)
    finally:
        for engine in engines.values():
            engine.close()
    one, two = (float(np.median(rates[count])) for count in (1, 2))
    spread = ", ".join(f"{min(each):.0f} to {max(each):.0f}" for each in rates.values())
    print(f"{title:10} one worker {one:6.0f} requests/s, two {two:6.0f}: {two / one:.2f}x   ({spread})")
    gaps = ", ".join(f"{each.median_s() * 1e3:.2f}" for each in idle.values())
    print(f"{'':10} between two rounds a worker waits {gaps} ms, as a median", flush=True)


def main() -> int:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"h = {options.hidden}, {options.requests} requests, load average {os.getloadavg()[0]:.1f}")
    lstm = lstm_model(num_words=workloads.NUM_WORDS, hidden_size=options.hidden)
    print(f"the loops alone on two threads: {bare_loops(lstm):.2f}x")
    compare("LSTM", lstm, workloads.sentences(options.requests))
    seq2seq = seq2seq_model(num_words=VOCABULARY, hidden_size=options.hidden, eos=None)
    compare("Seq2Seq", seq2seq, workloads.pairs(options.requests // 3, num_words=VOCABULARY))
    return 0


if __name__ == "__main__":
    sys.exit(main())
