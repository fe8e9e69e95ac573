"""Operator and load diversity: measured costs of real stages, all policies in virtual time (Figures 14, 16, 18)."""

from __future__ import annotations

import time
from dataclasses import dataclass

from mlsys_dvabatch.scheduling.costs import StageCosts, least_request_s, remaining_s
from mlsys_dvabatch.scheduling.policies.load import LazyPolicy, LoadOperatorPolicy, LoadPolicy
from mlsys_dvabatch.scheduling.policies.operator import OperatorPolicy
from mlsys_dvabatch.scheduling.policies.planner import TASK_S
from mlsys_dvabatch.scheduling.policies.registry import comp_wait_s
from mlsys_dvabatch.stages.profile import profile_stages
from mlsys_dvabatch.stages.slicing.partition import even_cuts
from mlsys_dvabatch.stages.slicing.sliced import SlicedModel
from mlsys_dvabatch.stages.zoo import open_program

from mlsys_bench.dvabatch.cases import Case, Costed, Outcome, best_static, delay_batch, run_case, zero_batch
from mlsys_bench.dvabatch.workloads import poisson_trace

QOS_S = 0.2  # the paper's latency target


@dataclass(frozen=True, slots=True)
class VisionBench:
    """One model, sliced and measured."""

    name: str
    costs: StageCosts

    @property
    def peak_rps(self) -> float:
        """Batches of the best size back to back: what the machine can do at most with whole batches."""
        return 1 / least_request_s(self.costs, 64)


def measure_model(name: str, *, is_quick: bool, num_stages: int = 4) -> VisionBench:
    """Slice a model in even stages and time them, in processor time of one core."""
    program = open_program(name)
    cuts = even_cuts(program.timed(4, repeats=1), program.allowed_cuts, num_stages)
    model = SlicedModel(program, cuts)

    sizes = (1, 2, 4, 8, 16) if is_quick else (1, 2, 4, 8, 16, 32, 64)
    table = profile_stages(model, lambda _: model.example, batch_sizes=sizes, repeats=3, clock=time.thread_time)
    return VisionBench(name, table)


def qos_s(costs: StageCosts) -> float:
    """Return the QoS target in seconds: the paper's, or twice a full batch's time if that is more.

    No load can be high within less than that.
    """
    return max(QOS_S, 2 * remaining_s(costs, 0, 64))


def policies(costs: StageCosts) -> list[Case]:
    """Return DVABatch in its forms; T_comp_wait leaves room for a full batch within the QoS target."""
    wait_s = max(comp_wait_s(costs, QOS_S, 64), 0.5 * remaining_s(costs, 0, 8))
    target_s = qos_s(costs)
    return [
        Case("split only", OperatorPolicy),
        Case("LazyBatch", lambda: LazyPolicy(comp_wait_s=wait_s)),
        Case("DVABatch, literal", lambda: LoadOperatorPolicy(mode="literal", comp_wait_s=wait_s)),
        Case("DVABatch", lambda: LoadOperatorPolicy(qos_s=target_s)),
        Case("DVABatch, III alone", lambda: LoadPolicy(qos_s=target_s)),
    ]


def tuned_window_s(bench: VisionBench, num: int) -> float:
    """Return DelayBatch's window in seconds with the lowest average latency at high load.

    The candidates are fractions of a full batch's time.
    """
    subject = Costed(bench.costs, TASK_S)
    trace = poisson_trace(0.9 * bench.peak_rps, [1] * num, lambda _: None)
    windows = [remaining_s(bench.costs, 0, 64) / divisor for divisor in (4, 16, 64, 256)]
    return min(windows, key=lambda window_s: run_case(delay_batch(window_s), subject, trace).mean_s)


def at_load(bench: VisionBench, load: float, *, num: int, window_s: float) -> list[Outcome]:
    """Run all cases at a share of the peak; the best static size comes third."""
    rate = load * bench.peak_rps
    trace = poisson_trace(rate, [1] * num, lambda _: None)
    subject = Costed(bench.costs, TASK_S)
    outcomes = [run_case(case, subject, trace, offered_rps=rate) for case in (zero_batch(), delay_batch(window_s))]
    outcomes.append(best_static(subject, trace, offered_rps=rate))
    outcomes += [run_case(case, subject, trace, offered_rps=rate) for case in policies(bench.costs)]
    return outcomes
