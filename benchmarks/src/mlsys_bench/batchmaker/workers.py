"""The suite ``batchmaker-workers``: one worker and two on real threads; requests a second by the clock on the wall.

Each worker is a thread with one core; the loop's thread and the one that unfolds requests share the cores with them, so
the machine needs two cores that do nothing else. Both take turns, and their answers are compared. The gain of two
threads that only compute, with no scheduler, comes first: cores share caches, memory and power.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from mlsys_batchmaker.engine import Engine, EngineConfig
from mlsys_batchmaker.models.model import Model
from mlsys_batchmaker.models.sequence import lstm_model, seq2seq_model
from mlsys_batchmaker.replay.systems import Chains
from mlsys_batchmaker.replay.trace import Request
from mlsys_batchmaker.scheduling.tasks import Round, RoundOutput
from mlsys_core.report import Section, Table

from mlsys_bench.batchmaker import workloads
from mlsys_bench.harness.machine import LoadMeter

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

REPEATS = 7
VOCABULARY = 300


def bare_loops(model: Model, *, repeats: int, rows: int = 64, steps: int = 20, calls: int = 10) -> float:
    """Return the speed-up of two threads over one for the cell's loops alone."""
    chains = [Chains(model.cells[0]) for _ in range(2)]
    words = np.zeros((steps, rows), dtype=np.int64)

    def work(own: Chains, times: int = calls) -> None:
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
    for _ in range(repeats):
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


def compare(model: Model, requests: Sequence[Request], *, repeats: int) -> dict[str, Any]:
    """Return requests a second and a worker's median wait between two rounds, by number of workers."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    idle = {count: Idle() for count in rates}
    engines = {
        count: Engine(model, EngineConfig(num_workers=count, pool_bytes=256 << 20), on_round=idle[count].note)
        for count in rates
    }
    try:
        for _ in range(repeats):
            answers = {}
            for count, engine in engines.items():
                rate, answers[count] = serve(engine, requests)
                rates[count].append(rate)
            for ours, theirs in zip(answers[1], answers[2], strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-3)
    finally:
        for engine in engines.values():
            engine.close()
    return {str(count): {"rps": rates[count], "idle_s": idle[count].median_s()} for count in rates}


def run(context: BenchContext, *, hidden: int = 1024, requests: int = 1000) -> Section:
    """Serve an LSTM and Seq2Seq.

    Args:
        context: The suite's context; quick has 32 hidden units, 60 requests and two repeats.
        hidden: Hidden size.
        requests: Of a run; Seq2Seq has a third of them.
    """
    torch.set_num_threads(1)
    repeats = 2 if context.is_quick else REPEATS
    hidden, requests = (32, 60) if context.is_quick else (hidden, requests)
    lstm = lstm_model(num_words=workloads.NUM_WORDS, hidden_size=hidden)
    seq2seq = seq2seq_model(num_words=VOCABULARY, hidden_size=hidden, eos=None)
    with LoadMeter() as meter:
        bare = bare_loops(lstm, repeats=repeats)
        found = {
            "LSTM": compare(lstm, workloads.sentences(requests), repeats=repeats),
            "Seq2Seq": compare(seq2seq, workloads.pairs(requests // 3, num_words=VOCABULARY), repeats=repeats),
        }
    rows = []
    for title, by_count in found.items():
        one, two = (float(np.median(by_count[count]["rps"])) for count in ("1", "2"))
        waits = ", ".join(f"{each['idle_s'] * 1e3:.2f}" for each in by_count.values())
        rows.append([title, f"{one:.0f}", f"{two:.0f}", f"{two / one:.2f}x", waits])
    columns = ["model", "one worker, requests/s", "two", "gain", "wait between two rounds, ms"]
    body: list[str | Table] = [
        f"The loops alone on two threads: {bare:.2f}x. {meter.load}",
        Table(columns, rows, f"h = {hidden}"),
    ]
    data = {"hidden": hidden, "requests": requests, "loops_gain": bare, "models": found}
    return Section("BatchMaker: two workers", body, data=data)
