"""Policy III: let later requests join a batch that is on its way (DVABatch, section 7.2), alone and with Policy II."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

from mlsys_core.loop.queue import ServeRequest

from mlsys_dvabatch.scheduling.costs import catch_up_s, remaining_s
from mlsys_dvabatch.scheduling.policies.base import Mode, New, Policy, State, Stretch
from mlsys_dvabatch.scheduling.policies.decisions import halves_literally
from mlsys_dvabatch.scheduling.policies.operator import OperatorPolicy
from mlsys_dvabatch.scheduling.table import Row


class LoadPolicy(Policy):
    """Stretch the latest batch while it is young; else a new batch.

    Literal: whenever its age is below ``comp_wait_s`` (the paper's T_comp_wait, its guard of the QoS target), all that
    wait join. Cost-aware: as many as is best by the costs, and unless just that makes the batch miss ``qos_s``; new
    batches are of the best size.

    Args:
        mode: which.
        comp_wait_s: literal: seconds since its creation during which a batch may be stretched.
        qos_s: cost-aware: seconds since its creation within which a batch is to leave; None for no target.
    """

    num_pairs: ClassVar[int] = 2

    def __init__(
        self,
        *,
        mode: Mode = "cost-aware",
        comp_wait_s: float = 0.1,
        qos_s: float | None = None,
    ) -> None:
        super().__init__(mode=mode)
        self.comp_wait_s = comp_wait_s
        self.qos_s = qos_s

    def admit(self, state: State, now: float) -> Sequence[New | Stretch]:
        """Return a stretch if it is allowed and pays, else a new batch as soon as one can start."""
        row = state.pipeline.stretchable()
        if row is not None and self._may_stretch(row, state):
            late = self._all_late(row, state, now) if self.mode == "literal" else self._best_late(row, state, now)
            if late:
                taken = state.take(late, now)
                fitting = [request for request in taken if request.length <= row.padded_length]
                longer = [request for request in taken if request.length > row.padded_length]
                operations: list[New | Stretch] = [Stretch(fitting)] if fitting else []
                return [*operations, *([New(longer)] if longer else [])]
        return self.begin(state, now)

    def begin(self, state: State, now: float) -> Sequence[New | Stretch]:
        """Return a new batch, of the size that the planner finds best; literal: of all that wait."""
        if self.mode == "literal" or not state.can_begin():
            return super().admit(state, now)
        best = state.planner(max(1, round(state.mean_length))).begin(state.num_waiting)
        return [New(state.take(best, now))]

    def run_to(self, row: Row, stage: int, state: State) -> int:
        """Return the last stage that it pays to run without being asked in between."""
        if self.mode == "literal":
            return stage
        behind = state.num_waiting + state.num_active - row.size
        return state.planner(row.padded_length).run_to(stage, row.size, behind)

    def _may_stretch(self, row: Row, state: State) -> bool:
        pipeline = state.pipeline  # the catch-up must be able to start now: later, more may have come
        return pipeline.working[0] is None and all(part.batch_id == row.batch_id for part in pipeline.queues[0])

    def _all_late(self, row: Row, state: State, now: float) -> int:
        young = now - row.created_s < self.comp_wait_s
        return max(0, min(state.num_waiting, state.max_batch_size - row.size)) if young else 0

    def _best_late(self, row: Row, state: State, now: float) -> int:
        """Return the optimal number of joiners.

        0 unless the batch has not begun, or is in one piece between two stages.
        """
        stages_done, length = max(row.progress.values(), default=0), row.padded_length
        if row.held_after is not None or state.pipeline.is_at_work(row):
            return 0
        late = state.planner(length).join(stages_done, row.size, state.num_waiting)
        if late and self.qos_s is not None:
            age_s = now - row.created_s
            catch_s = catch_up_s(state.costs, stages_done, late, length)
            with_s = age_s + catch_s + remaining_s(state.costs, stages_done, row.size + late, length)
            without_s = age_s + remaining_s(state.costs, stages_done, row.size, length)
            return 0 if without_s <= self.qos_s < with_s else late
        return late


class LoadOperatorPolicy(LoadPolicy):
    """Policies II and III together, for models whose operators prefer different batch sizes.

    Literal: a batch for which a split is foreseen is not stretched (section 5.2.2). Cost-aware: it may be, until it is
    split: small batches that catch up with each other, run together where that is cheaper, and part again. The serial
    manner, as Policy II.
    """

    num_pairs: ClassVar[int] = 1

    @cached_property
    def _operator(self) -> OperatorPolicy:
        return OperatorPolicy(mode=self.mode)

    def begin(self, state: State, now: float) -> Sequence[New | Stretch]:
        """Return a new batch; literal: not to be stretched if it would be split later."""
        return [
            New(operation.requests, can_stretch=not self._foresees(operation.requests, state))
            for operation in self._operator.admit(state, now)
        ]

    def split(self, row: Row, stage: int, state: State, now: float) -> Sequence[Sequence[str]]:
        """Return the split of Policy II."""
        return self._operator.split(row, stage, state, now)

    def _foresees(self, requests: Sequence[ServeRequest[Any]], state: State) -> bool:
        length = max((request.length for request in requests), default=1)
        stages = range(1, state.pipeline.num_stages)
        return self.mode == "literal" and any(
            halves_literally(state.costs, stage, len(requests), length) for stage in stages
        )


class LazyPolicy(LoadPolicy):
    """LazyBatch, which the paper compares with: stretch only, at every stage; slice the model by operators for it."""

    def __init__(self, *, comp_wait_s: float = 0.1, mode: Mode = "literal") -> None:
        super().__init__(mode=mode, comp_wait_s=comp_wait_s)


class EarlyExitPolicy(LoadPolicy):
    """Requests whose intermediate result is good enough leave, or skip stages (section 9.2); the rest goes on.

    The model says which answers are good enough (``ExitingModel.inspect``); those that leave make room for joiners.
    """

    wants_exits: ClassVar[bool] = True
