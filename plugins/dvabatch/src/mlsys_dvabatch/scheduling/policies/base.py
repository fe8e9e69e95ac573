"""The seam that third-party policies implement: a policy's view and its answers (Figure 12's user-defined conditions).

A policy is asked when requests wait (:meth:`Policy.admit`) and when a stage ends (:meth:`Policy.split`). It keeps no
requests: it takes them from :class:`State` and answers with the meta-operations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from mlsys_core.loop.queue import RequestQueue, ServeRequest

from mlsys_dvabatch.scheduling.costs import StageCosts, least_request_s
from mlsys_dvabatch.scheduling.pipeline import Pipeline
from mlsys_dvabatch.scheduling.policies.planner import Planner, planner_for
from mlsys_dvabatch.scheduling.table import Row

Mode = Literal["literal", "cost-aware"]  # the paper's rules to the letter, or only where the costs say that it pays


@dataclass(frozen=True, slots=True)
class New:
    """The meta-operation *new*: a batch of these requests."""

    requests: Sequence[ServeRequest[Any]]
    can_stretch: bool = True  # False where a split is foreseen


@dataclass(frozen=True, slots=True)
class Stretch:
    """The meta-operation *stretch*: these requests join the latest batch."""

    requests: Sequence[ServeRequest[Any]]


class State:
    """A policy's view of the scheduler, and the queue it takes from. Times are seconds of the loop's clock."""

    def __init__(
        self,
        pipeline: Pipeline,
        waiting: RequestQueue[Any],
        costs: StageCosts,
        *,
        max_batch_size: int,
        concurrency: int,
    ) -> None:
        self.pipeline = pipeline
        self.waiting = waiting
        self.costs = costs
        self.max_batch_size = max_batch_size
        self.concurrency = concurrency  # executors that the device can keep busy at the same time
        self.last_admission_s: float | None = None
        self.is_draining = False  # nobody else will come: wait for no company
        self.mean_length = 1.0  # average of recent requests, units
        self._arrivals_s: deque[float] = deque(maxlen=512)
        self._looks_ahead = False  # a batch is to be made that begins when the one at work ends
        self._busy_share = 1.0  # share of recent requests that found others here when they came

    @property
    def num_waiting(self) -> int:
        """Requests not yet in a batch."""
        return len(self.waiting)

    @property
    def num_active(self) -> int:
        """Requests in batches."""
        return self.pipeline.table.num_requests

    @property
    def oldest_s(self) -> float | None:
        """Since when the longest waiting request waits."""
        return self.waiting.oldest_s()

    def note_arrival(self, now: float) -> None:
        """Note that a request has come, and waits."""
        self._arrivals_s.append(now)
        self._busy_share += ((self.num_waiting > 1 or self.num_active > 0) - self._busy_share) / 16

    def utilisation(self, length: int = 1) -> float:
        """Return the load as a share of the peak at the best batch size, by the rate of the last 512 arrivals.

        No more than the share of requests that find others here: under Poisson arrivals that is the part of the time in
        which the server works, and so at least the load; a client that asks when it has its answer never finds any.
        """
        arrivals = self._arrivals_s
        if len(arrivals) < 8:
            return 0.3
        if arrivals[-1] <= arrivals[0]:  # all at once: more than can be served, whatever the costs
            return self._busy_share
        rate = (len(arrivals) - 1) / (arrivals[-1] - arrivals[0])
        return min(rate * least_request_s(self.costs, self.max_batch_size, length) / self.concurrency, self._busy_share)

    def planner(self, length: int = 1) -> Planner:
        """Return the planner for the present load; lengths up to the same power of two share one."""
        covering = 1 << max(0, length - 1).bit_length()
        load = self.utilisation(covering)
        nearest = 0.01 if load < 0.05 else round(min(max(load, 0.1), 0.95), 1)
        return planner_for(self.costs, self.max_batch_size, nearest, covering)

    def can_begin(self) -> bool:
        """Return whether a new batch would start at once: the first executor, a pair, and the device have room.

        While the scheduler looks ahead: whether it would start when the one at work ends.
        """
        if self._looks_ahead:
            return True
        pipeline = self.pipeline
        if pipeline.working[0] is not None or pipeline.queues[0] or pipeline.pairs.free_pair() is None:
            return False
        busy = sum(part is not None for part in pipeline.working)
        busy += sum(pipeline.can_start(stage) for stage, queue in enumerate(pipeline.queues) if queue)
        return busy < self.concurrency

    @contextmanager
    def looking_ahead(self) -> Iterator[None]:
        """Let :meth:`can_begin` be true for the batch after the one at work."""
        self._looks_ahead = True
        try:
            yield
        finally:
            self._looks_ahead = False

    def take(self, num: int, now: float) -> list[ServeRequest[Any]]:
        """Take the next ``num`` requests, by priority and arrival; fewer if fewer wait."""
        taken: list[ServeRequest[Any]] = []
        while len(taken) < num and (request := self.waiting.pop(now)) is not None:
            taken.append(request)
            self.mean_length += (request.length - self.mean_length) * 0.05
        return taken

    def take_these(self, requests: Sequence[ServeRequest[Any]]) -> list[ServeRequest[Any]]:
        """Take the given waiting requests, in any order."""
        for request in requests:
            self.waiting.cancel(request.request_id)
            self.mean_length += (request.length - self.mean_length) * 0.05
        return list(requests)


class Policy:
    """The base: a new batch of all that waits, as soon as one can start, and no other meta-operation.

    Subclasses override what they need. A third party registers one with ``mlsys_register_policies`` as a
    ``PolicySpec`` of kind ``"batching"`` called ``dvabatch-NAME``, whose factory takes ``mode`` and further options.
    """

    num_pairs: ClassVar[int] = 2  # buffer pairs it is made for: 1 is the serial manner
    wants_exits: ClassVar[bool] = False  # whether stages are to look for requests that can leave early

    def __init__(self, *, mode: Mode = "cost-aware") -> None:
        self.mode = mode

    def admit(self, state: State, now: float) -> Sequence[New | Stretch]:
        """Return the operations on waiting requests now; asked while any waits."""
        if not state.can_begin():
            return ()
        return [New(state.take(state.max_batch_size, now))]

    def split(self, row: Row, stage: int, state: State, now: float) -> Sequence[Sequence[str]]:
        """Return the groups into which ``row`` is split now that ``stage`` has ended; empty for no split."""
        return ()

    @property
    def splits_serially(self) -> bool:
        """True if the children of a split run one after another."""
        return True

    def run_to(self, row: Row, stage: int, state: State) -> int:
        """Return the last stage to run from ``stage`` on without being asked in between; called on one device only."""
        return stage

    def ahead_after_s(self, requests: Sequence[ServeRequest[Any]], state: State) -> float | None:
        """Return how long a batch of ``requests`` runs before the next may be made ready, in seconds; None: it is not.

        Asked of models of one stage whose executor can make a batch ready while another runs. :meth:`admit` makes it.
        """
        return None

    def can_fill(self, state: State) -> bool:
        """Return whether a batch made ready now would be full: nobody who comes later could have joined it."""
        return state.num_waiting >= state.max_batch_size

    def wake_at(self, state: State, now: float) -> float | None:
        """Return when :meth:`admit` may answer differently without an event; None if only events matter."""
        return None
