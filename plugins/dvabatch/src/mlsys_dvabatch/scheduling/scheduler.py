"""DVABatch as a scheduler of core's serving loop: one worker per stage, one task per part of a batch.

The pipeline keeps the batches (:mod:`mlsys_dvabatch.scheduling.pipeline`), the policy decides
(:mod:`mlsys_dvabatch.scheduling.policies`); here requests come in, leave, expire, are cancelled, and it is written
down where their activations are. Pure: tasks name activations by the task that made them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Any

from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.loop.protocols import Finished, FinishReason, WorkerId
from mlsys_core.loop.queue import RequestQueue, ServeRequest
from mlsys_serving.isolation import blamed

from mlsys_dvabatch.scheduling.costs import StageCosts
from mlsys_dvabatch.scheduling.pipeline import Pipeline
from mlsys_dvabatch.scheduling.policies.base import New, Policy, State, Stretch
from mlsys_dvabatch.scheduling.table import Part
from mlsys_dvabatch.scheduling.tasks import HeldRows, StageOutput, StageTask


class DvaScheduler:
    """Batches of several requests that may be joined and left between stages.

    A stage that fails with several requests is run again in halves until the one at fault is alone; only that fails.

    Args:
        policy: decides about new batches, stretches and splits.
        costs: seconds of each stage.
        max_batch_size: most requests in a batch, the paper's bs_max.
        max_waiting: most requests waiting; None for no bound.
        num_pairs: buffer pairs; None: what the policy is made for.
        concurrency: executors that the device can keep busy at the same time; None: one for each pair. Where it has to
            choose, the later stage goes first.
        looks_ahead: a model of one stage, whose executor takes a second task to make ready while the first runs. The
            policy says when (:meth:`.policies.base.Policy.ahead_after_s`).

    Raises:
        InvalidInputError: a number is below 1.

    Example:
        >>> from mlsys_core.loop import SimulatedExecutor, simulate
        >>> from mlsys_dvabatch.stages.simulated import parse_stages
        >>> model = parse_stages("1+0,1+0")
        >>> workers = [SimulatedExecutor(lambda task: task_s(model, task), simulated_output) for _ in range(2)]
        >>> run = simulate(DvaScheduler(Policy(), model), workers, [(0.0, ServeRequest("a", None))])
        >>> run["a"].latency_s
        0.002
    """

    def __init__(
        self,
        policy: Policy,
        costs: StageCosts,
        *,
        max_batch_size: int = 64,
        max_waiting: int | None = None,
        num_pairs: int | None = None,
        concurrency: int | None = None,
        looks_ahead: bool = False,
    ) -> None:
        pairs = policy.num_pairs if num_pairs is None else num_pairs
        self.pipeline = Pipeline(costs.num_stages, pairs)
        self.policy = policy
        self.concurrency = pairs if concurrency is None else concurrency
        if max_batch_size < 1 or self.concurrency < 1:
            raise InvalidInputError(
                f"max_batch_size={max_batch_size}, concurrency={self.concurrency}: must be 1 or more"
            )
        waiting: RequestQueue[Any] = RequestQueue(max_size=max_waiting)
        self.state = State(self.pipeline, waiting, costs, max_batch_size=max_batch_size, concurrency=self.concurrency)
        self._active: dict[str, ServeRequest[Any]] = {}
        self._held = HeldRows()
        self._skip_to: dict[str, int] = {}
        self._leaving: dict[str, FinishReason] = {}  # cancelled or expired while at work
        self._deadlines: list[tuple[float, str]] = []
        self._next_task = 0
        self._ahead = Ahead(policy, self.state) if looks_ahead and costs.num_stages == 1 else None
        self.counters: Counter[str] = Counter()  # meta-operations, gathers, rows copied

    @property
    def num_unfinished(self) -> int:
        """Requests admitted that have not left."""
        return len(self.state.waiting) + len(self._active)

    def add(self, request: ServeRequest[Any], now: float) -> None:
        """Take a request in.

        Raises:
            QueueFullError: ``max_waiting`` requests wait.
            InvalidInputError: its id belongs to an unfinished request.
        """
        if request.request_id in self._active:
            raise InvalidInputError(f"request id {request.request_id!r} is in a batch: ids must be unique")
        self.state.waiting.push(request, now)
        self.state.note_arrival(now)

    def cancel(self, request_id: str, now: float) -> Sequence[Finished[Any]]:
        """Drop a request: at once if it waits, anywhere; with its stage if it is at work."""
        if self.state.waiting.cancel(request_id) is not None:
            return [Finished(request_id, FinishReason.CANCELLED)]
        return self._withdraw(request_id, FinishReason.CANCELLED)

    def expire(self, now: float) -> Sequence[Finished[Any]]:
        """End the requests whose deadline has come, wherever they are; those at work leave with their stage."""
        expired = self.state.waiting.expire(now)
        left: list[Finished[Any]] = [Finished(request.request_id, FinishReason.EXPIRED) for request in expired]
        while self._deadlines and self._deadlines[0][0] <= now:
            left += self._withdraw(heapq.heappop(self._deadlines)[1], FinishReason.EXPIRED)
        return left

    def drain(self, now: float) -> None:
        """Note that nobody else comes: policies wait for no company."""
        self.state.is_draining = True

    def wake_at(self, now: float) -> float | None:
        """Return the end of the policy's window, or the next deadline."""
        times = [self.policy.wake_at(self.state, now), self.state.waiting.next_deadline_s()]
        if self._ahead is not None:
            times.append(self._ahead.wake_at())
        if self._deadlines:
            times.append(self._deadlines[0][0])
        return min((time for time in times if time is not None and time > now), default=None)

    def next_batch(self, worker: WorkerId, now: float) -> StageTask | None:
        """Return the next task of stage ``worker``; None if nothing may run there now."""
        stage, pipeline = int(worker), self.pipeline
        if not stage and len(self.state.waiting):
            self._admit(now)  # here alone: what is admitted can run only while the first stage is idle
        if not pipeline.queues[stage] or not pipeline.can_start(stage):
            return self._made_ready(now)
        later = range(stage + 1, pipeline.num_stages)
        room = self.concurrency - sum(part is not None for part in pipeline.working)
        if room <= sum(pipeline.can_start(other) for other in later if pipeline.queues[other]):
            return None  # later stages go first
        last_stage = self._run_to(stage)
        part = pipeline.start(stage)
        assert part is not None
        row = pipeline.table[part.batch_id]
        assert row.pair is not None
        row.is_passing = last_stage > stage
        task = self._task(part, stage, last_stage, row.padded_length, row.pair)
        if self._ahead is not None:
            self._ahead.note_begun(task, now)
        return task

    def complete(self, batch: StageTask, output: StageOutput, now: float) -> Sequence[Finished[Any]]:
        """Move the part on, and let those leave that are done."""
        if batch.is_last and len(output.results) != batch.num:
            mismatch = f"the last stage gave {len(output.results)} results for {batch.num} requests"
            return self.fail(batch, ServingError(mismatch), now)
        if batch.part.batch_id not in self.pipeline.table.rows:
            return self._all_left(batch)
        stage = self._pass_on(batch)
        finished: list[Finished[Any]] = []
        leaving: list[str] = []
        for position, request in enumerate(batch.requests):
            request_id = request.request_id
            if request_id in self._leaving:  # the pipeline has let it go already
                finished.append(self._leave(request_id, self._leaving.pop(request_id)))
            elif batch.is_last or position in output.exits:
                result = output.results[position] if batch.is_last else output.exits[position]
                finished.append(self._done(request, result, now))
                if not batch.is_last:
                    leaving.append(request_id)
                    self.counters["early exits"] += 1
            else:
                if position in output.skip_to:
                    self._skip_to[request_id] = output.skip_to[position]
                self._held.move(request_id, batch.number, position)
        if stage is None:
            return finished
        groups: Sequence[Sequence[str]] = ()
        row = self.pipeline.table[batch.part.batch_id]
        if not batch.is_last and row.size > len(leaving) + 1:
            groups = self.policy.split(row, stage, self.state, now)
            if len(groups) > 1:
                self.counters["split"] += 1
        self.pipeline.finish(stage, leaving=leaving, groups=groups, serial=self.policy.splits_serially)
        self._begin_ahead(now)
        return finished

    def fail(self, batch: StageTask, error: BaseException, now: float) -> Sequence[Finished[Any]]:
        """Run a part again in halves; a request that fails alone fails for good."""
        finished = [
            self._leave(r.request_id, self._leaving.pop(r.request_id))
            for r in batch.requests
            if r.request_id in self._leaving
        ]
        if batch.part.batch_id not in self.pipeline.table.rows:
            return finished
        self.pipeline.table[batch.part.batch_id].is_passing = False
        alive = [r for r in batch.requests if r.request_id in self._active]
        if batch.num > 1 and alive:
            self.counters["retried parts"] += 1
            self.pipeline.retry(batch.stage)
            self._begin_ahead(now)
            return finished
        cause = blamed(error) if isinstance(error, Exception) else error
        finished += [self._leave(r.request_id, FinishReason.FAILED, error=cause) for r in alive]
        self.pipeline.finish(batch.stage, leaving=[r.request_id for r in alive])
        self._begin_ahead(now)
        return finished

    # -- below ------------------------------------------------------------------------------------------------------

    def _admit(self, now: float) -> None:
        for operation in self.policy.admit(self.state, now):
            requests = operation.requests
            if not requests:
                continue
            for request in requests:
                self._active[request.request_id] = request
                if request.deadline_s is not None:
                    heapq.heappush(self._deadlines, (request.deadline_s, request.request_id))
            ids = [request.request_id for request in requests]
            if isinstance(operation, Stretch) and self.pipeline.stretchable() is not None:
                self.counters["stretch"] += 1
                self.pipeline.stretch(ids)
            else:
                self.counters["new"] += 1
                longest = max(request.length for request in requests)
                can_stretch = operation.can_stretch if isinstance(operation, New) else True
                self.pipeline.new(ids, now, padded_length=longest, can_stretch=can_stretch)
            self.state.last_admission_s = now

    def _task(self, part: Part, stage: int, last_stage: int, padded_length: int, pair: int) -> StageTask:
        task = StageTask(
            number=self._next_task,
            stage=stage,
            last_stage=last_stage,
            part=part,
            requests=tuple(self._active[request] for request in part.requests),
            padded_length=padded_length,
            pair=pair,
            sources=self._held.sources(part.requests) if stage else (),
            skips=frozenset(i for i, r in enumerate(part.requests) if self._skip_to.get(r, 0) > stage),
            drops=self._held.take_drops(),
            is_last=last_stage == self.pipeline.num_stages - 1,
        )
        self._next_task += 1
        if task.gathers:
            self.counters["gathered rows"] += task.num
        return task

    def _made_ready(self, now: float) -> StageTask | None:
        """Return a task to make ready behind the one at work, if it is time; its part waits in the pipeline's queue."""
        if self._ahead is None or not self._ahead.is_due(now):
            return None
        with self.state.looking_ahead():
            self._admit(now)
        if not self.pipeline.queues[0]:
            return None
        part = self.pipeline.queues[0][0]
        task = self._task(part, 0, 0, self.pipeline.table[part.batch_id].padded_length, pair=0)
        self._ahead.task = task
        self.counters["made ready ahead"] += 1
        return task

    def _begin_ahead(self, now: float) -> None:
        """Note that the task that was made ready runs now, less those of its requests that have left."""
        if self._ahead is None or (task := self._ahead.task) is None:
            return
        self._ahead.task = None
        if task.part.batch_id in self.pipeline.table.rows:
            self.pipeline.put_first(0, task.part.batch_id)
            part = self.pipeline.start(0)
            assert part is not None
        self._ahead.note_begun(task, now)

    def _all_left(self, batch: StageTask) -> list[Finished[Any]]:
        """Finish the requests of a batch that was made ready and cancelled as a whole before it ran."""
        return [self._leave(r.request_id, self._leaving.pop(r.request_id)) for r in batch.requests]

    def _run_to(self, stage: int) -> int:
        """Return the last stage of the run that begins in ``stage``: several stages where nobody has to be asked."""
        if self.concurrency > 1 or self.policy.wants_exits:
            return stage
        longest = self.pipeline.longest_run(stage)
        if longest == stage:
            return stage
        row = self.pipeline.table[self.pipeline.queues[stage][0].batch_id]
        return min(longest, self.policy.run_to(row, stage, self.state))

    def _pass_on(self, batch: StageTask) -> int | None:
        """Bring the pipeline to the last stage that ``batch`` has run; None if nobody is left to bring there."""
        row = self.pipeline.table[batch.part.batch_id]
        for stage in range(batch.stage, batch.last_stage):
            if not self.pipeline.pass_on(stage):
                return None
        row.is_passing = False
        return batch.last_stage

    def _withdraw(self, request_id: str, reason: FinishReason) -> list[Finished[Any]]:
        if request_id not in self._active or request_id in self._leaving:
            return []
        is_at_work = any(part is not None and request_id in part.requests for part in self.pipeline.working)
        is_at_work = is_at_work or (self._ahead is not None and self._ahead.holds(request_id))
        self.pipeline.cancel(request_id)
        if is_at_work:
            self._leaving[request_id] = reason
            return []
        return [self._leave(request_id, reason)]

    def _done(self, request: ServeRequest[Any], result: Any, now: float) -> Finished[Any]:
        if isinstance(result, BaseException):
            return self._leave(request.request_id, FinishReason.FAILED, error=result)
        if request.deadline_s is not None and now > request.deadline_s:
            return self._leave(request.request_id, FinishReason.EXPIRED)
        return self._leave(request.request_id, FinishReason.DONE, result=result)

    def _leave(
        self, request_id: str, reason: FinishReason, *, result: Any = None, error: BaseException | None = None
    ) -> Finished[Any]:
        del self._active[request_id]
        self._skip_to.pop(request_id, None)
        self._held.move(request_id, None, 0)
        if len(self._deadlines) > 2 * len(self._active) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._active]
            heapq.heapify(self._deadlines)
        return Finished(request_id, reason, result, error)


class Ahead:
    """Look-ahead of a model of one stage: the next batch is made ready while the present one runs.

    Between two batches the executor would otherwise wait for answers to be taken out, for the scheduler, and for the
    next batch's rows to be put together. A batch made ready is not joined any more, so it is made late, and only where
    enough requests wait to fill it.

    Args:
        policy: Says when.
        state: View of the scheduler.
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


def task_s(costs: StageCosts, task: StageTask) -> float:
    """Return the seconds of a task: the sum over all stages that it runs."""
    stages = range(task.stage, task.last_stage + 1)
    return sum(costs.stage_s(stage, task.num, task.padded_length) for stage in stages)


def simulated_output(task: StageTask) -> StageOutput:
    """Return the output of a task in a simulation: None for each request."""
    return StageOutput(results=[None] * task.num if task.is_last else ())
