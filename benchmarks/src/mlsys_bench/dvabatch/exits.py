"""The suite ``dvabatch-exits``: what early exits cost in accuracy and save in time, by rule and threshold.

Trained models (:mod:`.exit_subjects`) are exported and served by DVABatch's engine with the policy ``early-exit``, as
``mlsys dvabatch serve FILE.pt2 --policy early-exit --exit-rule RULE --exit-confidence THRESHOLD`` does. A fixed number
of clients each ask again when they have their answer. Thresholds take turns, round after round.

    pip install --no-deps chatterbot-corpus
    mlsys dvabatch bench exits
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from mlsys_core.config import settings
from mlsys_core.errors import MissingDependencyError
from mlsys_core.loop import ServeRequest
from mlsys_core.loop.protocols import Finished
from mlsys_core.report import Section, Table
from mlsys_dvabatch.engine import Engine
from mlsys_dvabatch.scheduling.policies.load import EarlyExitPolicy
from mlsys_dvabatch.serve.preparing import Batching, Prepared, prepare

from mlsys_bench.dvabatch.exit_subjects import Subject, encoder, resnet

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

CLIENTS = 8
NEVER = ("confidence", 1.0)
CHOICES = [
    NEVER,
    *(("confidence", at) for at in (0.99, 0.95, 0.9, 0.8, 0.7, 0.5)),
    *(("margin", at) for at in (0.9, 0.7, 0.5)),
    *(("entropy", at) for at in (0.9, 0.8, 0.6)),
]
QUICK = [NEVER, ("confidence", 0.9), ("margin", 0.7), ("entropy", 0.8)]


class Clients:
    """Clients that each submit the next request when one of theirs has left; a listener of the loop."""

    def __init__(self, requests: list[Any], lengths: list[int], clock: Any) -> None:
        self._requests, self._lengths, self._clock = requests, lengths, clock
        self._next = 0
        self.engine: Engine | None = None
        self.results: dict[int, Any] = {}
        self.latency_s: list[float] = []
        self._sent_s: dict[str, float] = {}
        self.done = threading.Event()

    def submit(self) -> None:
        """Send the next request, if there is one."""
        number, self._next = self._next, self._next + 1
        if number < len(self._requests):
            assert self.engine is not None
            self._sent_s[str(number)] = self._clock()
            request = ServeRequest(str(number), self._requests[number], length=self._lengths[number])
            self.engine.loop.submit(request, str(number))

    def on_output(self, batch: Any, output: Any, now: float) -> None:
        """Ignore the output; requests are told when they leave."""

    def on_finished(self, finished: Finished[Any], now: float) -> None:
        """Keep the answer and its time, and send the next."""
        self.results[int(finished.request_id)] = finished.result
        self.latency_s.append(self._clock() - self._sent_s[finished.request_id])
        if len(self.results) == len(self._requests):
            self.done.set()
        self.submit()


def measured(prepared: Prepared, subject: Subject, rule: str, at_least: float) -> dict[str, Any]:
    """Serve all requests of a subject once by one rule; return accuracy, exits and times."""
    model: Any = prepared.loaded.model
    getattr(model, "inner", model).decide_by(at_least, rule)
    lengths = [model.check(request) for request in subject.requests]
    clients = Clients(list(subject.requests), lengths, time.perf_counter)
    with Engine(
        model, prepared.costs, EarlyExitPolicy(), listener=clients, max_batch_size=CLIENTS, num_threads=1
    ) as engine:
        clients.engine = engine
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(CLIENTS):
            clients.submit()
        clients.done.wait()
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    num = len(subject.requests)
    scores = [clients.results[number] for number in range(num)]
    right = [int(np.argmax(score)) == label for (score, _), label in zip(scores, subject.labels, strict=True)]
    exits = np.bincount([int(head) for _, head in scores], minlength=model.num_stages)
    return {
        "accuracy": float(np.mean(right)),
        "exits": (exits / num).tolist(),
        "processor_ms": cpu_s / num * 1e3,
        "rate": num / wall_s,
        "median_ms": statistics.median(clients.latency_s) * 1e3,
        "p99_ms": float(np.quantile(clients.latency_s, 0.99)) * 1e3,
    }


def curve(subject: Subject, *, rounds: int, choices: list[tuple[str, float]]) -> list[dict[str, Any]]:
    """Return a row for each rule and threshold; times are medians over rounds, in which all take turns."""
    batching = Batching(policy="early-exit", max_batch_size=CLIENTS)
    prepared = prepare(str(subject.file), settings().cache_dir, batching)
    found: dict[tuple[str, float], list[dict[str, Any]]] = {choice: [] for choice in choices}
    measured(prepared, subject, *choices[0])  # warm-up
    for _ in range(rounds):
        for rule, at_least in choices:
            found[rule, at_least].append(measured(prepared, subject, rule, at_least))
    rows = []
    for (rule, at_least), runs in found.items():
        times = {
            key: statistics.median(run[key] for run in runs) for key in ("processor_ms", "rate", "median_ms", "p99_ms")
        }
        rows.append({"rule": rule, "at_least": at_least, **runs[0], **times})
    return rows


def run(context: BenchContext, *, rounds: int = 0, steps: int = 0) -> Section:
    """Run the suite; see :mod:`mlsys_core.bench`.

    Args:
        context: Where it prints and how long it may take.
        rounds: Turns of each threshold; 0: three, or one if it is to be quick.
        steps: Training steps of the ResNet-20; 0: 300, or 30.
    """
    is_quick = context.is_quick
    threads = torch.get_num_threads()
    body: list[Any] = [f"{CLIENTS} clients, one core, batches of at most {CLIENTS}."]
    data: dict[str, Any] = {"load_average": os.getloadavg()[0], "clients": CLIENTS, "subjects": []}
    try:
        torch.set_num_threads(1)
        made: list[Subject] = []
        cache_dir, num = settings().cache_dir, 64 if is_quick else 400
        try:
            made.append(encoder(cache_dir, num_tests=num))
        except MissingDependencyError as error:
            body.append(f"Encoder: missing. {error}")
        made.append(resnet(cache_dir, num_tests=num, steps=steps or (30 if is_quick else 300)))
        for subject in made:
            context.console.print(subject.name)
            rows = curve(subject, rounds=rounds or (1 if is_quick else 3), choices=QUICK if is_quick else CHOICES)
            data["subjects"].append({"name": subject.name, "data": subject.what, "rows": rows})
            columns = ["rule", "at least", "accuracy", "left at", "processor ms", "req/s", "median ms", "p99 ms"]
            body.append(Table(columns, [_cells(row) for row in rows], caption=f"{subject.name}: {subject.what}"))
    finally:
        torch.set_num_threads(threads)
    return Section("Early exits", body, data=data)


def _cells(row: dict[str, Any]) -> list[str]:
    left = " ".join(f"{share:.0%}" for share in row["exits"])
    times = [f"{row[key]:.2f}" for key in ("processor_ms", "rate", "median_ms", "p99_ms")]
    return [row["rule"], f"{row['at_least']:g}", f"{row['accuracy']:.1%}", left, *times]
