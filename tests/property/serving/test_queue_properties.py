"""The request queue against a list that is searched in full."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import QueueFullError, RequestQueue, ServeRequest

NAMES = st.sampled_from("abcdefghijkl")
MAX_SIZE = 6


@dataclass
class Known:
    """A waiting request in the model."""

    request: ServeRequest[None]
    pushed_s: float
    sequence: int


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = RequestQueue[None](max_size=MAX_SIZE, lane_of=lambda request: request.length % 3)
        self.now = 0.0
        self.waiting: list[Known] = []
        self.untold: list[str] = []  # expired, not yet handed over
        self.num_pushed = 0

    def _sweep(self) -> None:
        """Queues look at the clock when they are touched; the model does so at the same moments."""
        for known in [each for each in self.waiting if each.request.deadline_s is not None]:
            deadline_s = known.request.deadline_s
            if deadline_s is not None and deadline_s <= self.now:
                self.waiting.remove(known)
                self.untold.append(known.request.request_id)

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        name=NAMES,
        length=st.integers(1, 3),
        priority=st.integers(-1, 1),
        patience_s=st.none() | st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    )
    def push(self, name: str, length: int, priority: int, patience_s: float | None) -> None:
        deadline_s = None if patience_s is None else self.now + patience_s
        request = ServeRequest(name, None, length=length, priority=priority, deadline_s=deadline_s)
        self._sweep()
        if any(known.request.request_id == name for known in self.waiting):
            with pytest.raises(InvalidInputError, match=f"'{name}' waits already"):
                self.queue.push(request, self.now)
        elif len(self.waiting) == MAX_SIZE:
            with pytest.raises(QueueFullError) as refused:
                self.queue.push(request, self.now)
            assert 0 < refused.value.retry_after_s <= 60
        else:
            self.queue.push(request, self.now)
            self.waiting.append(Known(request, self.now, self.num_pushed))
            self.num_pushed += 1

    @rule(lane=st.integers(0, 2))
    def pop(self, lane: int) -> None:
        self._sweep()
        candidates = [known for known in self.waiting if known.request.length % 3 == lane]
        popped = self.queue.pop(self.now, lane=lane)
        if not candidates:
            assert popped is None
            return
        best = min(candidates, key=lambda known: (known.request.priority, known.sequence))
        assert popped is best.request
        self.waiting.remove(best)

    @rule(name=NAMES)
    def cancel(self, name: str) -> None:
        found = [known for known in self.waiting if known.request.request_id == name]
        assert self.queue.cancel(name) is (found[0].request if found else None)
        for known in found:
            self.waiting.remove(known)

    @rule()
    def expire(self) -> None:
        self._sweep()
        assert sorted(each.request_id for each in self.queue.expire(self.now)) == sorted(self.untold)
        self.untold.clear()

    @invariant()
    def agrees(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert sorted(self.queue.lanes) == sorted({known.request.length % 3 for known in self.waiting})
        deadlines_s = [known.request.deadline_s for known in self.waiting if known.request.deadline_s is not None]
        assert self.queue.next_deadline_s() == min(deadlines_s, default=None)
        assert self.queue.oldest_s() == min((known.pushed_s for known in self.waiting), default=None)
        for name in "abcdefghijkl":
            assert (name in self.queue) == any(known.request.request_id == name for known in self.waiting)


TestQueue: Any = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=40)
