"""Serve above capacity for ten minutes, with cancellations: no answer may be wrong, lost or doubled.

    mlsys bench dvabatch-soak seconds=600 policies=input,load

The engine serves a staged model, whose answers reveal their inputs, on threads at 120 % of its capacity, under each
policy in turn. A tenth of the requests is cancelled at a random moment, some have deadlines, some hold a value that
their stage refuses. Every request must end once; a result must be its own input's; at the end nothing may be kept. The
suite fails if anything was wrong.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import Finished, FinishReason, ServeRequest
from mlsys_dvabatch.engine import Engine
from mlsys_dvabatch.scheduling.policies.base import Policy
from mlsys_dvabatch.scheduling.policies.input import InputPolicy
from mlsys_dvabatch.scheduling.policies.load import LoadOperatorPolicy, LoadPolicy
from mlsys_dvabatch.scheduling.policies.operator import OperatorPolicy
from mlsys_dvabatch.scheduling.scheduler import DvaScheduler
from mlsys_dvabatch.stages.activations import Padded
from mlsys_dvabatch.stages.simulated import LinearStage, StagedModel

from mlsys_bench.harness.text import rows_section

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

STAGE_S = LinearStage(0.010, 0.0015)  # slow enough that a small machine keeps up with 120 % of it
POLICIES: dict[str, Callable[[], Policy]] = {
    "input": InputPolicy,
    "input-literal": lambda: InputPolicy(mode="literal"),
    "operator-literal": lambda: OperatorPolicy(mode="literal"),
    "operator": OperatorPolicy,
    "load": LoadPolicy,
    "load-literal": lambda: LoadPolicy(mode="literal"),
    "load-operator-literal": lambda: LoadOperatorPolicy(mode="literal"),
    "load-operator": LoadOperatorPolicy,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One policy under load."""

    policy: str
    requests: int
    reasons: str  # how many ended for which reason
    operations: str  # how often the scheduler did what
    wrong: int  # results that are not their own input's
    lost: int
    doubled: int
    batches_left: int
    outputs_kept: int
    is_drained: bool  # within 60 waits of a second

    @property
    def is_good(self) -> bool:
        """True if each request ended once and rightly, and no batch is left."""
        return self.is_drained and not (self.wrong or self.lost or self.doubled or self.batches_left)


class Model:
    """A model of three stages; each sleeps for its time and writes itself into the answer."""

    num_stages = 3

    def collate(self, requests: Any, padded_length: int) -> Padded:
        """Collect one number for each request."""
        return Padded({"x": torch.stack([request.payload for request in requests])})

    def run(self, stage: int, values: Padded) -> Padded:
        """Turn x into 2 x + stage."""
        x = values.tensors["x"]
        time.sleep(STAGE_S.fixed_s + STAGE_S.per_item_s * len(x))
        if bool((x < 0).any()):
            raise ValueError("negative")
        return Padded({"x": 2 * x + stage})

    def results(self, values: Padded) -> list[Any]:
        """Return the numbers."""
        return list(values.tensors["x"].clone())


class Listener:
    """Records the end of each request."""

    def __init__(self) -> None:
        self.ended: dict[str, Finished[Any]] = {}
        self.doubled = 0
        self._lock = threading.Lock()

    def on_output(self, batch: Any, output: Any, now: float) -> None:
        """Ignore partial output."""

    def on_finished(self, finished: Finished[Any], now: float) -> None:
        """Record the request's end, and whether it is the second one."""
        with self._lock:
            self.doubled += finished.request_id in self.ended
            self.ended[finished.request_id] = finished


def soak(name: str, seconds: float, *, load: float, seed: int) -> Row:
    """Run one policy."""
    rng, listener = random.Random(seed), Listener()
    model = StagedModel((STAGE_S,) * 3)
    rate = load * 32 / model.seconds(32)
    sent: dict[str, float] = {}
    with Engine(
        Model(), model, POLICIES[name](), listener=listener, max_batch_size=32, max_waiting=256, num_threads=1
    ) as engine:
        end_s = due_s = engine.clock.now()
        end_s += seconds
        doomed: list[tuple[float, str]] = []
        while due_s < end_s:
            due_s += rng.expovariate(rate)
            time.sleep(max(0.0, due_s - engine.clock.now()))
            request_id = str(len(sent))
            value = float(-1 if rng.random() < 0.01 else len(sent) % 100_000)
            deadline_s = due_s + rng.uniform(0.05, 2.5) if rng.random() < 0.2 else None
            sent[request_id] = value
            engine.loop.submit(
                ServeRequest(request_id, torch.tensor(value), length=rng.randint(1, 60), deadline_s=deadline_s),
                request_id,
            )
            if rng.random() < 0.1:
                doomed.append((due_s + rng.uniform(0, 1.5), request_id))
            for at, other in [each for each in doomed if each[0] <= due_s]:
                doomed.remove((at, other))
                engine.loop.cancel(other)
        drained = any(engine.loop.drain(1) for _ in range(60))  # if this process is held still, one wait is lost
        scheduler, runner = engine.scheduler, engine.runner
    assert isinstance(scheduler, DvaScheduler)
    wrong = [
        name_
        for name_, finished in listener.ended.items()
        if finished.reason is FinishReason.DONE and (sent[name_] < 0 or finished.result != 8 * sent[name_] + 4)
    ]
    return Row(
        policy=name,
        requests=len(sent),
        reasons=_counts(Counter(finished.reason.value for finished in listener.ended.values())),
        operations=_counts(scheduler.counters),
        wrong=len(wrong),
        lost=len(sent.keys() - listener.ended.keys()),
        doubled=listener.doubled,
        batches_left=len(scheduler.pipeline.table.rows),
        outputs_kept=runner.num_kept,
        is_drained=drained,
    )


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items())


def run(
    context: BenchContext,
    *,
    policies: tuple[str, ...] = tuple(POLICIES),
    seconds: float = 600.0,
    load: float = 1.2,
    seed: int = 0,
) -> Section:
    """Run each policy.

    Args:
        context: The suite's context; quick has one second for each policy.
        policies: Names in :data:`POLICIES`.
        seconds: In all, shared by all policies that there are.
        load: Of the capacity.
        seed: Of arrivals and cancellations.
    """
    if unknown := set(policies) - POLICIES.keys():
        raise InvalidInputError(f"no policy is called {min(unknown)!r}: there are {', '.join(POLICIES)}")
    torch.set_num_threads(1)
    each_s = 1.0 if context.is_quick else seconds / len(POLICIES)
    rows = []
    for number, name in enumerate(policies):
        context.console.print(f"{name} ...")
        rows.append(soak(name, each_s, load=load, seed=seed + number))
    is_good = all(row.is_good for row in rows)
    return rows_section("DVABatch: above capacity", rows, status="ok" if is_good else "failed", load=load, seed=seed)
