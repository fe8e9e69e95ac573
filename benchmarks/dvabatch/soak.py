"""Serve above capacity for ten minutes, with cancellations: no answer may be wrong, lost or doubled.

    python benchmarks/dvabatch/soak.py --seconds 600

The engine serves a staged model, whose answers reveal their inputs, on threads at 120 % of its capacity, under each
policy in turn. A tenth of the requests is cancelled at a random moment, some have deadlines, some hold a value that
their stage refuses. Every request must end once; a result must be its own input's; at the end nothing may be kept. The
exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from mlsys_core.serving import Finished, FinishReason, ServeRequest
from mlsys_dvabatch.engine import Engine
from mlsys_dvabatch.scheduling.policies.base import Policy
from mlsys_dvabatch.scheduling.policies.input import InputPolicy
from mlsys_dvabatch.scheduling.policies.load import LoadOperatorPolicy, LoadPolicy
from mlsys_dvabatch.scheduling.policies.operator import OperatorPolicy
from mlsys_dvabatch.scheduling.scheduler import DvaScheduler
from mlsys_dvabatch.stages.activations import Padded
from mlsys_dvabatch.stages.simulated import LinearStage, StagedModel

STAGE_S = LinearStage(0.010, 0.0015)  # slow enough that a small machine keeps up with 120 % of it
POLICIES: dict[str, Callable[[], Policy]] = {
    "input": InputPolicy,
    "input, literal": lambda: InputPolicy(mode="literal"),
    "operator, literal": lambda: OperatorPolicy(mode="literal"),
    "operator": OperatorPolicy,
    "load": LoadPolicy,
    "load, literal": lambda: LoadPolicy(mode="literal"),
    "load-operator, literal": lambda: LoadOperatorPolicy(mode="literal"),
    "load-operator": LoadOperatorPolicy,
}


class Model:
    """A model of three stages; each sleeps for its time and writes itself into the answer."""

    num_stages = 3

    def collate(self, requests: Any, padded_length: int) -> Padded:
        """Collect one number for each request."""
        return Padded({"x": torch.stack([request.payload for request in requests])})

    def run(self, stage: int, values: Padded) -> Padded:
        """Turn x into 2 x + stage."""
        x = values.tensors["x"]
        time.sleep(STAGE_S.seconds(len(x)))
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


def soak(name: str, seconds: float, *, load: float, seed: int) -> bool:
    """Run one policy; return True if all went well."""
    rng, listener = random.Random(seed), Listener()
    model = StagedModel((STAGE_S,) * 3)
    rate = load * model.peak_rps(32)
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
    counts = Counter(finished.reason.value for finished in listener.ended.values())
    wrong = [
        name_
        for name_, finished in listener.ended.items()
        if (finished.reason is FinishReason.DONE and float(finished.result) != 8 * sent[name_] + 4)
        or (sent[name_] < 0 and finished.reason is FinishReason.DONE)
    ]
    lost = sent.keys() - listener.ended.keys()
    rows = scheduler.pipeline.table.rows
    good = drained and not (wrong or lost or listener.doubled or rows)
    operations = dict(scheduler.counters)
    print(
        f"{name}: {len(sent)} requests, {dict(counts)}, {operations}, wrong {len(wrong)}, lost {len(lost)}, "
        f"doubled {listener.doubled}, batches left {len(rows)}, outputs kept {runner.num_kept}"
        f"{'' if drained else ', not drained in 60 waits of a second'}: {'ok' if good else 'FAILED'}",
        flush=True,
    )
    return good


def main() -> int:
    """Run all policies; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="in all, shared by the policies")
    parser.add_argument("--load", type=float, default=1.2, help="over the capacity")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", choices=list(POLICIES), help="this one alone, for its share of the time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    good = [
        soak(name, options.seconds / len(POLICIES), load=options.load, seed=options.seed + number)
        for number, name in enumerate(POLICIES)
        if options.policy in (None, name)
    ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
