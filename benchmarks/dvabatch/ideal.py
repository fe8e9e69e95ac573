"""Largest possible gain of letting requests join a batch on one device: the best schedule for measured costs.

A batch goes through its stages; after each, some of those waiting may catch up and join it. Under Poisson arrivals that
is a semi-Markov decision process over (stages done, requests in the batch, requests waiting). Relative value iteration
finds the lowest average latency that any schedule of this kind reaches, and the lowest with whole batches only. The
policies of DVABatch are simulated beside them on the same costs. Splits are left out.

    python benchmarks/dvabatch/ideal.py vgg19-weights --json ideal.json
    python benchmarks/dvabatch/ideal.py --stage-ms 6+0.01,6+0.01,6+0.01,6+0.01 --load 0.1 --load 0.25
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mlsys_core.environment import describe_environment
from mlsys_dvabatch.bench.arms import Arm, run_arm, zero_batch
from mlsys_dvabatch.bench.subjects import Costed
from mlsys_dvabatch.bench.vision import measure_model
from mlsys_dvabatch.bench.workloads import poisson_trace
from mlsys_dvabatch.scheduling.costs import StageCosts, catch_up_s, least_request_s
from mlsys_dvabatch.scheduling.policies.load import LoadPolicy
from mlsys_dvabatch.scheduling.policies.planner import TASK_S, poisson
from mlsys_dvabatch.stages.simulated import parse_stages

MOST = 64  # requests in a batch
NUM_STATES = 161  # numbers of requests waiting, 0 included
SIZES = [*range(1, 17), *range(20, MOST + 1, 4)]  # of new batches, and of those who join
WAITING = np.arange(NUM_STATES)


def arrivals(mean: float) -> Any:
    """Return the chances [waiting before, waiting after]; counts beyond the largest state fall into it."""
    chances, moves = poisson(mean)[:NUM_STATES], np.zeros((NUM_STATES, NUM_STATES))
    for waiting in range(NUM_STATES):
        moves[waiting, waiting:] = chances[: NUM_STATES - waiting]
        moves[waiting, -1] += 1 - moves[waiting].sum()
    return moves


class Process:
    """The process at one rate of arrivals; values are updated in place by :meth:`sweep`."""

    def __init__(self, costs: StageCosts, rate: float, *, joins: bool) -> None:
        self.costs, self.rate, self.joins = costs, rate, joins
        stages, numbers = range(costs.num_stages), range(1, MOST + 1)
        self.seconds = np.array([[costs.stage_s(stage, num) for num in numbers] for stage in stages])
        self.seconds[0] += TASK_S
        self.moves = [np.stack([arrivals(rate * seconds) for seconds in row]) for row in self.seconds]
        self.catch_s = {
            (done, late): catch_up_s(costs, done, late) + 2 * TASK_S for done in stages[1:] for late in SIZES[:-1]
        }
        self.catch_moves = {key: arrivals(rate * seconds).T for key, seconds in self.catch_s.items()}
        self.step_s = 0.999 * float(self.seconds.min())
        self.empty = np.zeros(NUM_STATES)  # values with nothing at work, by requests waiting
        self.values = np.zeros((costs.num_stages, MOST, NUM_STATES))  # [stages done, requests - 1, waiting]

    def _worth(self, present: Any, seconds: Any, later: Any, before: Any, idle_s: float = 0.0) -> Any:
        """Return the value of one step of ``step_s``, in which ``present`` requests wait for ``seconds``."""
        share = self.step_s / (seconds + idle_s)
        waited_s = present * seconds + self.rate * seconds**2 / 2
        return share * (waited_s + later) + (1 - share) * before

    def sweep(self) -> Any:
        """Improve all values once; return the rise of those of the empty device."""
        values, seconds = self.values, self.seconds
        begun = np.matmul(self.moves[0], values[1][:, :, None])[:, :, 0]
        empty = np.full(NUM_STATES, np.inf)
        empty[0] = self._worth(1, seconds[0, 0], begun[0, 0], self.empty[0], idle_s=1 / self.rate)
        for num in SIZES:
            worth = self._worth(WAITING[num:], seconds[0, num - 1], begun[num - 1, :-num], self.empty[num:])
            empty[num:] = np.minimum(empty[num:], worth)
        new = values.copy()
        for done in range(1, self.costs.num_stages):
            after = values[done + 1] if done + 1 < self.costs.num_stages else np.tile(self.empty, (MOST, 1))
            later = np.matmul(self.moves[done], after[:, :, None])[:, :, 0]
            present = np.arange(1, MOST + 1)[:, None] + WAITING
            new[done] = self._worth(present, seconds[done][:, None], later, values[done])
            for late in SIZES[:-1] if self.joins else ():
                later = (values[done, late:] @ self.catch_moves[done, late])[:, :-late]
                worth = self._worth(
                    present[:-late, late:], self.catch_s[done, late], later, values[done, :-late, late:]
                )
                new[done, :-late, late:] = np.minimum(new[done, :-late, late:], worth)
        rise = empty - self.empty
        self.empty, self.values = empty - empty[0], new - empty[0]
        return rise

    def mean_s(self, *, tolerance: float = 0.001) -> float:
        """Return the lowest average latency, once all states' values rise alike, within ``tolerance``."""
        for number in range(5000):
            rise = self.sweep()[: NUM_STATES // 2]
            if number > 800 and np.ptp(rise) < tolerance * abs(rise.mean()):
                break
        return float(rise.mean() / self.step_s / self.rate)


def main() -> None:
    """Measure, solve, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="of `mlsys dvabatch bench --part vision`, measured in 4 stages")
    parser.add_argument("--stage-ms", action="append", default=[], help="costs instead of a model: 6+0.01,6+0.01")
    parser.add_argument("--load", type=float, action="append", help="of the best batches' peak; 0.1, 0.25, 0.6")
    parser.add_argument("--requests", type=int, default=4000, help="simulated at each load")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    subjects: dict[str, StageCosts] = {text: parse_stages(text) for text in options.stage_ms}
    subjects |= {name: measure_model(name, is_quick=False).costs for name in options.models}
    rows = []
    for name, costs in subjects.items():
        for load in options.load or (0.1, 0.25, 0.6):
            rate = load / least_request_s(costs, MOST)
            whole_s, joined_s = (Process(costs, rate, joins=joins).mean_s() for joins in (False, True))
            trace = poisson_trace(rate, [1] * options.requests, lambda _: None)
            arms = (zero_batch(), Arm("DVABatch", LoadPolicy))
            zero_s, dva_s = (run_arm(arm, Costed(costs, TASK_S), trace).mean_s for arm in arms)
            rows.append(
                {"model": name, "load": load, "whole_ms": whole_s * 1e3, "joined_ms": joined_s * 1e3}
                | {"zero_ms": zero_s * 1e3, "dvabatch_ms": dva_s * 1e3}
            )
            print(
                f"{name} at {load:g}: best whole batches {whole_s * 1e3:.1f} ms, best with joining "
                f"{joined_s * 1e3:.1f} ({joined_s / whole_s:.3f}x); simulated: ZeroBatch {zero_s * 1e3:.1f}, DVABatch "
                f"{dva_s * 1e3:.1f} ({dva_s / zero_s:.3f}x)",
                flush=True,
            )
    if options.json:
        costs_s = {
            name: [[costs.stage_s(stage, num) for num in (1, 2, 4, 8, 16, 32, 64)] for stage in range(costs.num_stages)]
            for name, costs in subjects.items()
        }
        result = {"environment": describe_environment(), "costs_s": costs_s, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
