"""The suite ``dvabatch-ideal``: the largest gain of letting requests join a batch on one device, for measured costs.

A batch goes through its stages; after each, some of those waiting may catch up and join it. Under Poisson arrivals that
is a semi-Markov decision process over (stages done, requests in the batch, requests waiting). Relative value iteration
finds the lowest average latency that any schedule of this kind reaches, and the lowest with whole batches only. The
policies of DVABatch are simulated beside them on the same costs. Splits are left out; of them the rise of the peak is
told that the best size for each stage gives over the best size for all.

    mlsys bench dvabatch-ideal models=vgg19-weights
    mlsys bench dvabatch-ideal stage_ms=6+0.01,6+0.01,6+0.01,6+0.01 loads=0.1,0.25
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from mlsys_core.report import Section, Table
from mlsys_dvabatch.scheduling.costs import StageCosts, catch_up_s, least_request_s
from mlsys_dvabatch.scheduling.policies.load import LoadOperatorPolicy, LoadPolicy
from mlsys_dvabatch.scheduling.policies.planner import TASK_S, poisson
from mlsys_dvabatch.stages.simulated import parse_stages

from mlsys_bench.dvabatch.cases import Case, run_case, zero_batch
from mlsys_bench.dvabatch.subjects import Costed
from mlsys_bench.dvabatch.vision import measure_model
from mlsys_bench.dvabatch.workloads import poisson_trace

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

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
        """Return the lowest average latency, once all states' values rise alike, within ``tolerance``.

        NaN: they do not, after 5,000 sweeps: stages are too short beside batches, or the load is too high.
        """
        for number in range(5000):
            rise = self.sweep()[: NUM_STATES // 2]
            if number > 800 and np.ptp(rise) < tolerance * abs(rise.mean()):
                return float(rise.mean() / self.step_s / self.rate)
        return float("nan")


def split_peak(costs: StageCosts) -> float:
    """Return the peak with the best batch size for each stage, over that with the best size for all stages."""
    sizes = range(1, MOST + 1)
    by_stage_s = sum(min(costs.stage_s(stage, num) / num for num in sizes) for stage in range(costs.num_stages))
    return min(catch_up_s(costs, costs.num_stages, num) / num for num in sizes) / by_stage_s


def run(
    context: BenchContext,
    *,
    models: tuple[str, ...] = (),
    stage_ms: str = "6+0.01,6+0.01,6+0.01,6+0.01",
    loads: tuple[float, ...] = (0.1, 0.25, 0.6),
    requests: int = 4000,
) -> Section:
    """Solve and simulate.

    Args:
        context: The suite's context; quick simulates a tenth of the requests at the first load.
        models: Of the suite ``dvabatch``'s vision part, measured in 4 stages.
        stage_ms: Costs of stages in milliseconds beside these; empty: none.
        loads: Of the best batches' peak.
        requests: Simulated at each load.
    """
    if context.is_quick:
        loads, requests = loads[:1], requests // 10
    torch.set_num_threads(1)
    subjects: dict[str, StageCosts] = {stage_ms: parse_stages(stage_ms)} if stage_ms else {}
    subjects |= {name: measure_model(name, is_quick=context.is_quick).costs for name in models}
    rows = []
    for name, costs in subjects.items():
        for load in loads:
            rate = load / least_request_s(costs, MOST)
            whole_s, joined_s = (Process(costs, rate, joins=joins).mean_s() for joins in (False, True))
            trace = poisson_trace(rate, [1] * requests, lambda _: None)
            cases = (zero_batch(), Case("DVABatch", LoadPolicy), Case("DVABatch, splits", LoadOperatorPolicy))
            zero_s, dva_s, split_s = (run_case(case, Costed(costs, TASK_S), trace).mean_s for case in cases)
            found = {"whole_ms": whole_s, "joined_ms": joined_s, "zero_ms": zero_s, "dvabatch_ms": dva_s}
            found["dvabatch_splits_ms"] = split_s
            row = {"model": name, "load": load, **{key: 1e3 * seconds for key, seconds in found.items()}}
            rows.append(row | {"split_peak": split_peak(costs)})
            context.console.print(f"{name}, load {load:g}: solved")
    columns = ["model", "load", "best whole batches, ms", "best with joining, ms", "ZeroBatch, ms", "DVABatch III, ms"]
    columns += ["II and III, ms", "peak by stages' sizes"]
    lines = []
    for row in rows:
        shown = [f"{row[key]:.1f}" for key in list(row)[2:-1]]
        lines.append([str(row["model"]), str(row["load"]), *shown, f"{row['split_peak']:.2f}x"])
    costs_s = {
        name: [[costs.stage_s(stage, num) for num in (1, 2, 4, 8, 16, 32, 64)] for stage in range(costs.num_stages)]
        for name, costs in subjects.items()
    }
    data = {"costs_s": costs_s, "rows": rows}
    return Section("DVABatch: the ideal of joining", [Table(columns, lines, "Average latency")], data=data)
