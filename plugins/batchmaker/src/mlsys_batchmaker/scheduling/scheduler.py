"""The cellular scheduler behind core's :class:`~mlsys_core.loop.protocols.Scheduler` protocol.

``next_batch`` answers with what Algorithm 1 formed when the worker became idle (:mod:`batching`), ``complete`` with the
requests that are done (:mod:`completion`); :mod:`admission` keeps who is here. No torch, no clock, no threads.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence

from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import Finished, FinishReason, WorkerId
from mlsys_core.memory import RunPool, Runs

from mlsys_batchmaker.plan.layout import Layout
from mlsys_batchmaker.scheduling.admission import Admission
from mlsys_batchmaker.scheduling.batching import schedule
from mlsys_batchmaker.scheduling.completion import give_up, update_from_output
from mlsys_batchmaker.scheduling.requests import CellRequest, CellResult, NoValues, ValueStore
from mlsys_batchmaker.scheduling.state import Counters, SchedulerConfig, State
from mlsys_batchmaker.scheduling.tasks import Round, RoundOutput

DEFAULT_ROWS = 1 << 16


class CellularScheduler:
    """Scheduler that batches single cells of unfolded requests (BatchMaker, sections 3 and 4).

    Args:
        layout: layout of the model's cells.
        config: settings for batching.
        devices: by worker, the device it runs on; one worker on one device by default.
        num_rows: rows of each bank; None: 65,536 each, for simulations.
        store: gets the constants of admitted requests; None: nobody does.
        new_rows: makes the pool of a bank's rows, from the first row and one above the last.

    Example:
        >>> from mlsys_batchmaker.plan import CellGraph, CellSpec, Planner, Port
        >>> h = Port("h", "float32", (4,))
        >>> layout = Layout([CellSpec("rnn", (h,), (h,))])
        >>> graph = CellGraph(layout)
        >>> graph.result(graph.chain("rnn", 3, carry={"h": "h"}).last("h"))
        >>> scheduler = CellularScheduler(layout)
        >>> scheduler.add(CellRequest("a", Planner(layout).plan(graph), graph.constants), 0.0)
        >>> [len(scheduler.next_batch(WorkerId(0), 0.0).tasks) for _ in range(3)]
        [1, 1, 1]
    """

    def __init__(
        self,
        layout: Layout,
        *,
        config: SchedulerConfig | None = None,
        devices: Sequence[int] = (0,),
        num_rows: Sequence[int] | None = None,
        store: ValueStore | None = None,
        new_rows: Callable[[int, int], Runs] = RunPool,
    ) -> None:
        if not devices:
            raise InvalidInputError("a scheduler needs at least one worker's device")
        self.config = SchedulerConfig() if config is None else config
        rows = [DEFAULT_ROWS] * len(layout.banks) if num_rows is None else list(num_rows)
        self._state = State.new(layout, self.config, devices, rows)
        self._admission = Admission(self._state, rows, NoValues() if store is None else store, new_rows)
        self._formed: list[deque[Round]] = [deque() for _ in devices]  # by worker: not handed out yet
        self._num_out = [0] * len(devices)  # by worker: rounds handed out and not back
        self._handed_s = [0.0] * len(devices)  # by worker: when the latest was
        self._deadlines: list[tuple[float, str, int]] = []  # heap of (deadline, request id, order of arrival)
        self._ids: dict[str, int] = {}  # unfinished requests with a deadline -> their order of arrival
        self._num_added = 0

    @property
    def num_unfinished(self) -> int:
        """Requests admitted that have not left."""
        return self._admission.num_unfinished

    @property
    def counters(self) -> Counters:
        """Totals since the start."""
        return self._state.counters

    def members(self, batch: Round) -> list[str]:
        """Return the ids of the requests with cells in a round that was handed out and has not been completed."""
        owners = {int(index) for task in batch.tasks for index in self._state.tables.sub_request[task.subs]}
        return [self._admission.by_index[index].request.request_id for index in sorted(owners)]

    def add(self, request: CellRequest, now: float) -> None:
        """Admit ``request``; see :meth:`Admission.add` for what is refused."""
        self._admission.add(request, now)
        if request.deadline_s is not None:
            self._num_added += 1
            self._ids[request.request_id] = self._num_added
            heapq.heappush(self._deadlines, (request.deadline_s, request.request_id, self._num_added))

    def cancel(self, request_id: str, now: float) -> Sequence[Finished[CellResult]]:
        """Let the request leave at once; its cells in flight are computed in vain."""
        return self._drop(request_id, FinishReason.CANCELLED)

    def expire(self, now: float) -> Sequence[Finished[CellResult]]:
        """Let requests leave whose deadline has come, and return them."""
        left: list[Finished[CellResult]] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id, order = heapq.heappop(self._deadlines)
            if self._ids.get(request_id) == order:
                left += self._drop(request_id, FinishReason.EXPIRED)
        return left

    def next_batch(self, worker: WorkerId, now: float) -> Round | None:
        """Return the round that this worker runs next; new tasks are formed only when it is idle."""
        formed = self._formed[worker]
        if not formed:
            if self._num_out[worker]:
                return None
            tasks = tuple(schedule(self._state, worker))
            if not tasks:
                return None
            if self.config.batching == "chunk":
                formed.append(Round(worker, tasks))
            else:
                formed.extend(Round(worker, (task,)) for task in tasks)
        self._num_out[worker] += 1
        self._handed_s[worker] = now
        return formed.popleft()

    def complete(self, batch: Round, output: RoundOutput, now: float) -> Sequence[Finished[CellResult]]:
        """Take the output of a round."""
        self._num_out[batch.worker] -= 1
        if self.config.batching == "chunk":
            num_steps = sum(task.steps for task in batch.tasks)
            self._state.step_s[batch.tasks[0].cell] = (now - self._handed_s[batch.worker]) / num_steps
        return self._forget(update_from_output(self._state, self._admission, batch, output, now))

    def fail(self, batch: Round, error: BaseException, now: float) -> Sequence[Finished[CellResult]]:
        """Let the requests leave with ``error`` that had cells in this failed round; the others go on."""
        self._num_out[batch.worker] -= 1
        return self._forget(give_up(self._state, self._admission, batch, error))

    def wake_at(self, now: float) -> float | None:
        """Return the next deadline; nothing else depends on the time."""
        while self._deadlines and self._ids.get(self._deadlines[0][1]) != self._deadlines[0][2]:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _drop(self, request_id: str, reason: FinishReason) -> Sequence[Finished[CellResult]]:
        live = self._admission.by_id.get(request_id)
        if live is not None:
            self._admission.leave(live, reason)
            self._admission.free_what_left()
        elif not self._admission.drop_waiting(request_id):
            return ()
        return self._forget([Finished(request_id, reason)])

    def _forget(self, finished: list[Finished[CellResult]]) -> list[Finished[CellResult]]:
        if self._ids:
            for each in finished:
                self._ids.pop(each.request_id, None)
        return finished
