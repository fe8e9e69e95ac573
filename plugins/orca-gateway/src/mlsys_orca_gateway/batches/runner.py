"""Runs the lines of batches through the app's own routes, where the engine has room that no client wants."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from mlsys_orca.api.answers import given
from mlsys_orca.api.service import Front
from mlsys_orca.engine.client import EngineClient
from mlsys_serving.http.bodies import parse_json
from pydantic_core import to_json

from mlsys_orca_gateway.batches.files import FileStore, KeptFile
from mlsys_orca_gateway.batches.lines import Plan, answer_line, line_identity, missing_line, plan_of, request_id_of
from mlsys_orca_gateway.batches.records import BatchError, BatchErrors, Load, RequestCounts, may_start, to_yield
from mlsys_orca_gateway.batches.store import BatchStore, RunningBatch
from mlsys_orca_gateway.inside import InsideAnswer, InsideClient
from mlsys_orca_gateway.log import LogUnavailableError

_log = logging.getLogger(__name__)
_LOOK_S = 0.02  # between two looks at the engine's load while lines run or wait
_REST_S = 5.0  # between two looks when no batch runs
_SWEEP_S = 5.0  # between two looks at what may be forgotten
_RETRY_S = 1.0  # after the disk was full, or the server was busy
_LEAVE_S = 2.0  # in which an engine has dropped a request that was cancelled: after its iteration
_EMBEDDINGS = "/v1/embeddings"
_NOT_WHOLE = ("stream", "background")  # fields of requests
_AGAIN = (429, 503)  # statuses of a server that cannot now


@dataclass(slots=True)
class _Line:
    """One request of a batch that runs."""

    index: int
    weight: int
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Work:
    """A batch that runs, in memory."""

    running: RunningBatch
    plan: Plan
    pending: deque[int]
    lines: dict[int, _Line] = field(default_factory=dict)  # the oldest first
    num_attempts: dict[int, int] = field(default_factory=dict)  # by request, of those that ran more than once
    unsaved: list[tuple[int, bytes, bool]] = field(default_factory=list)  # ends that found no room on the disk


class BatchRunner:
    """Runs all batches of a store, the oldest first, until it is cancelled.

    Args:
        files: Where input is, and output goes.
        store: The batches.
        inside: Asks the routes.
        engine: Whose room is filled.
        front: Threads for reading and writing.
        reach: Called when a batch has ended, for tests.
        now: Returns the time, in seconds since the epoch.
    """

    def __init__(
        self,
        files: FileStore,
        store: BatchStore,
        inside: InsideClient,
        engine: EngineClient,
        front: Front,
        *,
        reach: Callable[[str], None] = lambda _: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._files, self._store, self._reach = files, store, reach
        self._inside, self._engine, self._front, self._now = inside, engine, front, now
        self._works: dict[str, _Work] = {}
        self._woken = asyncio.Event()
        self._not_before_s = 0.0  # monotonic; a server that was busy is left alone until then
        self._is_draining = False
        self._swept_s = -_SWEEP_S
        self._leaving = deque[tuple[float, int]]()  # until when answers that were cancelled count, and how many
        self._is_full = False

    def wake(self) -> None:
        """Look at the batches now: one has begun or is to be cancelled."""
        self._woken.set()

    def drain(self) -> None:
        """Begin no more lines."""
        self._is_draining = True

    async def run(self) -> None:
        """Run batches until cancelled; lines that run then run again in the next life."""
        try:
            while True:
                self._woken.clear()
                wait_s = _REST_S
                try:
                    await self._step()
                    wait_s = _LOOK_S if self._store.running else _REST_S
                    self._say_full(None)
                except (LogUnavailableError, OSError) as error:
                    self._say_full(error)
                    wait_s = _RETRY_S
                except Exception as error:  # noqa: BLE001 - a defect must not end the batches of the others
                    self._say_full(error)
                    wait_s = _RETRY_S
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), wait_s)
        finally:
            await self._leave([line for work in self._works.values() for line in work.lines.values()])
            self._engine.num_of_batches = 0

    def _say_full(self, error: Exception | None) -> None:
        if error is not None and not self._is_full:
            is_expected = isinstance(error, LogUnavailableError | OSError)
            _log.error("batches pause: %s", error, exc_info=None if is_expected else error)
        elif error is None and self._is_full:
            _log.warning("batches go on")
        self._is_full = error is not None

    async def _step(self) -> None:
        if time.monotonic() - self._swept_s > _SWEEP_S:
            self._swept_s = time.monotonic()
            self._store.delete_old()
            self._files.delete_expired(self._store.files_in_use())
        for batch_id, running in list(self._store.running.items()):
            if running.kept.batch.status == "validating":
                await self._validate(running)
            if batch_id not in self._works and not running.kept.batch.is_ended:
                await self._open(running)
            if batch_id in self._works:
                await self._advance(self._works[batch_id])
        self._count()
        self._yield()
        self._fill()

    # --- one batch

    async def _validate(self, running: RunningBatch) -> None:
        plan = await self._plan(running)
        if running.kept.batch.status != "validating":  # cancelled meanwhile
            return
        if plan.errors:
            await self._fail(running, plan)
            return
        counts = RequestCounts(total=len(plan))
        await running.move(running.kept.moved("in_progress", self._now(), request_counts=counts, model=plan.model))

    async def _plan(self, running: RunningBatch) -> Plan:
        batch = running.kept.batch
        path = self._files.path(batch.input_file_id)

        def read() -> Plan:
            with path.open("rb") as file:
                return plan_of(file, batch.endpoint)

        try:
            return await asyncio.to_thread(read)
        except FileNotFoundError:
            message = f"the input file {batch.input_file_id} is not there any more"
            return Plan(errors=[BatchError(code="file_not_found", message=message, param="input_file_id")])

    async def _open(self, running: RunningBatch) -> None:
        plan, batch = await self._plan(running), running.kept.batch
        if len(plan) < batch.request_counts.total:  # somebody has taken the file away from below the server
            await self._fail(running, plan)
            return
        pending = deque(index for index in range(len(plan)) if index not in running.done)
        self._works[batch.id] = _Work(running, plan, pending)

    async def _fail(self, running: RunningBatch, plan: Plan) -> None:
        failed = running.kept.moved("failed", self._now(), errors=BatchErrors(data=plan.errors))
        await self._store.end(running, failed)

    async def _advance(self, work: _Work) -> None:
        running = work.running
        for end in list(work.unsaved):
            await self._save(work, *end)
            work.unsaved.remove(end)
        batch = running.kept.batch
        if batch.status == "in_progress" and self._now() >= batch.expires_at:
            await self._leave(list(work.lines.values()))
            await self._end(work, "expired")
        elif batch.status == "cancelling":
            await self._leave(list(work.lines.values()))
            await self._end(work, "cancelled")
        elif batch.status == "in_progress" and len(running.done) == batch.request_counts.total:
            await running.move(running.kept.moved("finalizing", self._now()))
        if running.kept.batch.status == "finalizing":
            await self._end(work, "completed")

    async def _end(self, work: _Work, status: str) -> None:
        running = work.running
        output, error = await asyncio.to_thread(write_output, running, self._files, work.plan, status)
        await self._files.add(*(kept for kept in (output, error) if kept is not None))
        names = {
            "output_file_id": None if output is None else output.file.id,
            "error_file_id": None if error is None else error.file.id,
        }
        num_left = running.kept.batch.request_counts.total - len(running.done)
        counts = running.counts.model_copy(update={"failed": running.counts.failed + num_left})
        await self._store.end(running, running.kept.moved(status, self._now(), request_counts=counts, **names))  # type: ignore[arg-type]
        self._works.pop(running.kept.batch.id, None)
        self._reach("ended")

    # --- lines

    @property
    def _lines(self) -> list[tuple[_Work, _Line]]:
        return [(work, line) for work in self._works.values() for line in work.lines.values()]

    def _load(self) -> Load:
        return Load(self._engine.config.num_at_once, self._engine.num_unfinished, self._engine.num_of_batches)

    def _count(self) -> None:
        now_s = time.monotonic()
        while self._leaving and self._leaving[0][0] <= now_s:
            self._leaving.popleft()
        self._engine.num_of_batches = sum(weight for _, weight in self._leaving) + sum(
            line.weight for work, line in self._lines if work.running.kept.batch.endpoint != _EMBEDDINGS
        )

    def _fill(self) -> None:
        if self._is_draining or self._engine.failure is not None or time.monotonic() < self._not_before_s:
            return
        for work in self._works.values():
            batch = work.running.kept.batch
            while work.pending and batch.status == "in_progress" and not work.unsaved:
                weight = work.plan.weights[work.pending[0]]
                if batch.endpoint == _EMBEDDINGS:  # the encoder takes one caller at a time
                    if any(
                        other.running.kept.batch.endpoint == _EMBEDDINGS and other.lines
                        for other in self._works.values()
                    ):
                        break
                elif not may_start(self._load(), weight):
                    return
                line = _Line(work.pending.popleft(), weight)
                work.lines[line.index] = line
                self._count()
                line.task = asyncio.create_task(self._run(work, line))
                line.task.add_done_callback(partial(self._ended, work, line))

    def _yield(self) -> None:
        lines = [(work, line) for work, line in self._lines if work.running.kept.batch.endpoint != _EMBEDDINGS]
        running = [(line.weight, work.num_attempts.get(line.index, 1) - 1) for work, line in lines]
        num = to_yield(self._load(), running)
        for _, line in lines[len(lines) - num :]:
            assert line.task is not None
            line.task.cancel()

    async def _run(self, work: _Work, line: _Line) -> None:
        batch = work.running.kept.batch
        attempt, request_id = work.num_attempts.get(line.index, 0), request_id_of(batch.id, line.index)
        work.num_attempts[line.index] = attempt + 1
        identity = line_identity(batch.id, line.index, attempt, batch.in_progress_at or batch.created_at)
        custom_id, body, refused = await self._front.run(
            self._read, work, line.index, size=work.plan.stops[line.index] - work.plan.starts[line.index]
        )
        if refused is not None:
            message = f"a line of a batch is answered whole: leave out {refused!r}"
            error = {"type": "invalid_request_error", "code": "invalid_value", "message": message, "param": refused}
            answer = InsideAnswer(400, to_json({"error": {**error, "request_id": request_id}}))
        else:
            extra = given(identity, work.running.kept.owner or "")
            answer = await self._inside.post(batch.endpoint, body, request_id=request_id, extra=extra)
        if answer.status in _AGAIN or (answer.status >= 500 and self._engine.failure is not None):
            work.num_attempts[line.index] = attempt  # nothing ran
            self._not_before_s = time.monotonic() + _RETRY_S
            return
        end = (line.index, answer_line(request_id, custom_id, answer.status, answer.body), answer.status >= 400)
        work.num_attempts.pop(line.index, None)
        try:
            await self._save(work, *end)
        except (LogUnavailableError, OSError) as error:
            work.unsaved.append(end)
            self._say_full(error)

    def _read(self, work: _Work, index: int) -> tuple[str, bytes, str | None]:
        """Return a line's custom id and body, and the field that asks for less than a whole answer, if one does."""
        start, stop = work.plan.starts[index], work.plan.stops[index]
        with self._files.path(work.running.kept.batch.input_file_id).open("rb") as file:
            file.seek(start)
            value = parse_json(file.read(stop - start))
        body = value["body"]
        return value["custom_id"], to_json(body), next((name for name in _NOT_WHOLE if body.get(name)), None)

    async def _save(self, work: _Work, index: int, text: bytes, has_failed: bool) -> None:
        await work.running.add_result(index, text, has_failed=has_failed)

    def _ended(self, work: _Work, line: _Line, task: asyncio.Task[None]) -> None:
        work.lines.pop(line.index, None)
        if task.cancelled() and work.running.kept.batch.endpoint != _EMBEDDINGS:
            self._leaving.append((time.monotonic() + _LEAVE_S, line.weight))
        self._count()
        is_saved = line.index in work.running.done or any(line.index == index for index, _, _ in work.unsaved)
        if not is_saved:
            work.pending.appendleft(line.index)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a line of a batch could not be run, and is tried again", exc_info=error)
            self._not_before_s = time.monotonic() + _RETRY_S
        self._woken.set()

    async def _leave(self, lines: list[_Line]) -> None:
        tasks = [line.task for line in lines if line.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_WHY = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed: the batch was cancelled."),
}


def write_output(
    running: RunningBatch, files: FileStore, plan: Plan, status: str
) -> tuple[KeptFile | None, KeptFile | None]:
    """Write the files of a batch; from any thread. Done twice it writes the same files again.

    Args:
        running: The batch, all of whose requests have ended that will.
        files: Where they go; they are not yet made known there.
        plan: Places of its requests, for those that did not run.
        status: How it ends.

    Returns:
        The output file and the error file; None where it would be empty.

    Raises:
        LogUnavailableError: the disk is full.
    """
    kept, total = running.kept, running.kept.batch.request_counts.total
    failed = [index for index in range(total) if running.done.get(index, True)]
    done = [index for index in range(total) if not running.done.get(index, True)]

    def text(indices: list[int]) -> Iterator[bytes]:
        for index in indices:
            yield (running.line(index) if index in running.done else missing(index)) + b"\n"

    def missing(index: int) -> bytes:
        with files.path(kept.batch.input_file_id).open("rb") as source:
            source.seek(plan.starts[index])
            value = parse_json(source.read(plan.stops[index] - plan.starts[index]))
        return missing_line(request_id_of(kept.batch.id, index), value["custom_id"], *_WHY[status])

    def write(name: str, indices: list[int]) -> KeptFile | None:
        if not indices:
            return None
        return files.write(
            text(indices),
            filename=f"{kept.batch.id}_{name}.jsonl",
            purpose="batch_output",
            owner=kept.owner,
            file_id=f"file-{kept.batch.id.removeprefix('batch_')}-{name}",
            keep_s=kept.output_keep_s,
        )

    return write("output", done), write("error", failed)
