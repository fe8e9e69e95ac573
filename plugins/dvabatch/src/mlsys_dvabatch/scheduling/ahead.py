"""Look-ahead of a model of one stage: the next batch is made ready while the present one runs.

Between two batches the executor would otherwise wait for answers to be taken out, for the scheduler, and for the next
batch's rows to be put together. A batch made ready is not joined any more, so it is made late, and only where enough
requests wait to fill it whoever comes.
"""

from __future__ import annotations

from mlsys_dvabatch.scheduling.policies.base import Policy, State
from mlsys_dvabatch.scheduling.tasks import StageTask


class Ahead:
    """The task that is made ready, and the time from which there may be one.

    Args:
        policy: says when.
        state: of the scheduler.
    """

    def __init__(self, policy: Policy, state: State) -> None:
        self._policy, self._state = policy, state
        self._due_s: float | None = None  # None: the policy makes none ready behind the task at work
        self.task: StageTask | None = None  # submitted, and not begun by the scheduler's books

    def note_begun(self, task: StageTask, now: float) -> None:
        """Note that ``task`` runs from ``now`` on."""
        after_s = self._policy.ahead_after_s(task.requests, self._state)
        self._due_s = None if after_s is None else now + after_s

    def is_due(self, now: float) -> bool:
        """Return whether a task is to be made ready now."""
        return self._may_be() and self._due_s is not None and now >= self._due_s and self._policy.can_fill(self._state)

    def wake_at(self) -> float | None:
        """Return when :meth:`is_due` may become true; None if nothing waits for that."""
        return self._due_s if self._may_be() and self._state.num_waiting else None

    def holds(self, request_id: str) -> bool:
        """Return whether a request is in the task that is made ready."""
        return self.task is not None and request_id in self.task.part.requests

    def _may_be(self) -> bool:
        pipeline = self._state.pipeline
        return self.task is None and pipeline.working[0] is not None and not pipeline.queues[0]
