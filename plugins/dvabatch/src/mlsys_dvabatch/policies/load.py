"""Policy III: let later requests join a batch that is on its way (DVABatch, section 7.2), alone and with Policy II."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from mlsys_dvabatch.policies.base import Mode, New, Policy, State, Stretch
from mlsys_dvabatch.policies.decisions import halves_literally, stretch_pays
from mlsys_dvabatch.policies.operator import OperatorPolicy
from mlsys_dvabatch.table import Row


class LoadPolicy(Policy):
    """Stretch the latest batch while it is young; else a new batch.

    Literal: whenever its age is below ``comp_wait_s`` (the paper's T_comp_wait, its guard of the QoS target).
    Cost-aware: only if moreover the waiting it saves the late ones exceeds what it costs the earlier ones.

    Args:
        mode: which.
        comp_wait_s: seconds since its creation during which a batch may be stretched.
        max_stage: stretch only batches that have completed at most so many stages; None for any (the artifact has it).
    """

    num_pairs: ClassVar[int] = 2

    def __init__(self, *, mode: Mode = "cost-aware", comp_wait_s: float = 0.1, max_stage: int | None = None) -> None:
        super().__init__(mode=mode)
        self.comp_wait_s = comp_wait_s
        self.max_stage = max_stage

    def admit(self, state: State, now: float) -> Sequence[New | Stretch]:
        """A stretch if it is allowed and pays, else a new batch as soon as one can start."""
        row = state.pipeline.stretchable()
        if row is not None and self._may_stretch(row, state, now):
            late = min(state.num_waiting, state.max_batch_size - row.size)
            if late and self._pays(row, late, state):
                taken = state.take(late, now)
                fitting = [request for request in taken if request.length <= row.padded_length]
                longer = [request for request in taken if request.length > row.padded_length]
                operations: list[New | Stretch] = [Stretch(fitting)] if fitting else []
                return [*operations, *([New(longer)] if longer else [])]
        return self.begin(state, now)

    def begin(self, state: State, now: float) -> Sequence[New | Stretch]:
        """A new batch of what waits."""
        return super().admit(state, now)

    def _may_stretch(self, row: Row, state: State, now: float) -> bool:
        stages_done = max(row.progress.values(), default=0)
        if now - row.created_s >= self.comp_wait_s or (self.max_stage is not None and stages_done > self.max_stage):
            return False
        pipeline = state.pipeline  # the catch-up must be able to start now: later, more may have come
        return pipeline.working[0] is None and all(part.batch_id == row.batch_id for part in pipeline.queues[0])

    def _pays(self, row: Row, late: int, state: State) -> bool:
        if self.mode == "literal" or row.held_after is not None:
            return self.mode == "literal"
        pipeline, stages_done = state.pipeline, max(row.progress.values(), default=0)
        at_work = any(part is not None and part.batch_id == row.batch_id for part in pipeline.working)
        held_after = stages_done if at_work else stages_done - 1
        return held_after < 0 or stretch_pays(state.costs, held_after, row.size, late, length=row.padded_length)


class LoadOperatorPolicy(LoadPolicy):
    """Policies II and III together, for models whose operators prefer different batch sizes.

    A batch for which a split is foreseen is not stretched (section 5.2.2). The serial manner, as Policy II.
    """

    num_pairs: ClassVar[int] = 1

    def __init__(self, *, mode: Mode = "cost-aware", comp_wait_s: float = 0.1, max_stage: int | None = None) -> None:
        super().__init__(mode=mode, comp_wait_s=comp_wait_s, max_stage=max_stage)
        self._operator = OperatorPolicy(mode=mode)

    def begin(self, state: State, now: float) -> Sequence[New | Stretch]:
        """A new batch, marked if it would be split later."""
        operations = []
        for operation in self._operator.admit(state, now):
            num, length = len(operation.requests), max((r.length for r in operation.requests), default=1)
            foreseen = self._foresees(num, length, state)
            operations.append(New(operation.requests, can_stretch=not foreseen))
        return operations

    def split(self, row: Row, stage: int, state: State, now: float) -> Sequence[Sequence[str]]:
        """Policy II's."""
        return self._operator.split(row, stage, state, now)

    def _foresees(self, num: int, length: int, state: State) -> bool:
        stages = range(1, state.pipeline.num_stages)
        if self.mode == "literal":
            return any(halves_literally(state.costs, stage, num, length) for stage in stages)
        return any(len(self._operator.sizes(stage, num, state.num_waiting, length, state)) > 1 for stage in stages)


class LazyPolicy(LoadPolicy):
    """LazyBatch, which the paper compares with: stretch only, at every stage; slice the model by operators for it."""

    def __init__(self, *, comp_wait_s: float = 0.1, mode: Mode = "literal") -> None:
        super().__init__(mode=mode, comp_wait_s=comp_wait_s)


class EarlyExitPolicy(LoadPolicy):
    """Requests whose intermediate result is good enough leave, or skip stages (section 9.2); the rest goes on.

    What is good enough is the model's to say (``SlicedModel.inspect``); what leaves makes room for others to join.
    """

    wants_exits: ClassVar[bool] = True
