"""Policy II: split a batch when the rest of the model prefers smaller ones (DVABatch, section 7.2, Figure 13)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from mlsys_dvabatch.scheduling.policies.base import New, Policy, State, Stretch
from mlsys_dvabatch.scheduling.policies.decisions import halves_literally
from mlsys_dvabatch.scheduling.table import Row


class OperatorPolicy(Policy):
    """Halves that run serially, as often as it pays.

    Literal: after a stage, halve if T_remain(bs) >= 2 T_remain(bs / 2); batches are as large as they come.
    Cost-aware: halve if that saves more waiting than it adds, before the first stage too, which keeps batches small
    where the whole model prefers it.
    """

    num_pairs: ClassVar[int] = 1

    def admit(self, state: State, now: float) -> Sequence[New | Stretch]:
        """Return a new batch, not larger than is good for the requests in it."""
        if not state.can_begin():
            return ()
        num = min(state.num_waiting, state.max_batch_size)
        if self.mode == "cost-aware":
            num = state.planner(max(1, round(state.mean_length))).begin(state.num_waiting)
        return [New(state.take(num, now))]

    def split(self, row: Row, stage: int, state: State, now: float) -> Sequence[Sequence[str]]:
        """Return halves, or halves of halves; odd requests go to the first."""
        requests, length = list(row.progress), row.padded_length
        if self.mode == "literal":
            if not halves_literally(state.costs, stage + 1, row.size, length):
                return ()
            middle = (row.size + 1) // 2
            return [requests[:middle], requests[middle:]]
        behind = state.num_waiting + state.num_active - row.size
        sizes = state.planner(length).split(stage + 1, row.size, behind)
        starts = [sum(sizes[:position]) for position in range(len(sizes))]
        return [requests[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def run_to(self, row: Row, stage: int, state: State) -> int:
        """Return the last stage before the next split."""
        if self.mode == "literal":
            return stage
        behind = state.num_waiting + state.num_active - row.size
        return state.planner(row.padded_length).run_to(stage, row.size, behind)
