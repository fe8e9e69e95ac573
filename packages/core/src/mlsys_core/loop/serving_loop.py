"""The one serving loop: admits requests, keeps the workers filled, passes on their results.

Subsystems bring a scheduler and executors (:mod:`mlsys_core.loop.protocols`); fronts call
:meth:`ServingLoop.submit` and :meth:`ServingLoop.cancel` from any thread and hear the rest through a listener. ORCA's
Algorithm 1 is one shape of :meth:`ServingLoop.step`: fill the engine with ``n_workers`` batches, wait for one to
return, go on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, Self

from mlsys_core.errors import MlsysError, ServingError
from mlsys_core.loop.dispatch import Dispatcher, Guarded
from mlsys_core.loop.inbox import Call, Cancel, Inbox, LoopClosedError, LoopState
from mlsys_core.loop.protocols import (
    Batch,
    BatchTraces,
    Clock,
    Draining,
    Executor,
    Expiring,
    Finished,
    FinishReason,
    Listener,
    LoopRecorder,
    Output,
    Request,
    Scheduler,
)
from mlsys_core.loop.workers import Completion, Latch, Lost

_logger = logging.getLogger(__name__)


class ServingLoop(Generic[Request, Batch, Output]):
    """Joins one scheduler, one executor per worker and a clock.

    The listener hears of the end of every accepted request exactly once, after any failure: of its batch, an
    executor, the listener or the scheduler, or after a stop of the loop. Run it in a thread of its own
    (:meth:`start`, or :meth:`run_forever` in yours), or drive :meth:`step` by hand; ``submit`` and ``cancel`` may come
    from any thread.

    Args:
        scheduler: decides what runs next; only the loop calls it. ``Expiring`` and ``Draining`` are used if offered.
        executors: one per worker, or a single one; the loop closes them when it stops.
        clock: ``WallClock``, or ``VirtualClock`` with simulated executors.
        recorder: gets a span per batch and the number of unfinished requests; None records nothing.
        listener: hears outputs and finished requests, in the loop's thread.
        traces: of requests, which note the batches that they run in; the clock must be ``WallClock``. None: none are.

    Raises:
        InvalidInputError: there is no executor, or the executors do not go together.

    Example:
        >>> from mlsys_core.loop import Collector, InlineExecutor, ServeRequest, WallClock
        >>> from mlsys_core.loop.baselines import ZeroBatch
        >>> executor = InlineExecutor(lambda batch: [request.payload.upper() for request in batch.requests])
        >>> collector = Collector()
        >>> with ServingLoop(ZeroBatch(max_batch_size=8), executor, WallClock(), listener=collector) as loop:
        ...     loop.submit(ServeRequest("a", "hello"), "a")
        ...     loop.drain()
        True
        >>> collector.finished["a"].result
        'HELLO'
    """

    def __init__(
        self,
        scheduler: Scheduler[Request, Batch, Output],
        executors: Executor[Batch, Output] | Sequence[Executor[Batch, Output]],
        clock: Clock,
        *,
        recorder: LoopRecorder | None = None,
        listener: Listener[Batch, Output] | None = None,
        traces: BatchTraces | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._expiring = scheduler if isinstance(scheduler, Expiring) else None
        self._draining = scheduler if isinstance(scheduler, Draining) else None
        self._clock = clock
        self._recorder = recorder
        self._listener = Guarded(listener)
        self._inbox: Inbox[Request] = Inbox()
        self._dispatcher = Dispatcher(
            scheduler,
            executors if isinstance(executors, Sequence) else [executors],
            clock=clock,
            recorder=recorder,
            traces=traces,
            on_output=self._listener.on_output,
            on_finished=self._tell_finished,
        )
        self._driving = threading.Lock()  # held by who drives the loop; nobody waits for it
        self._has_rung = False  # an interrupt is under way that no wait has consumed: there is at most one
        self._runner: int | None = None  # the thread in step(), in run_forever(), or in start() until its thread runs
        self._is_waiting = False  # the runner has looked at its inbox, and may block
        self._is_running = False  # run_forever() is at work, or about to be
        self._is_stopping = False
        self._unraised: BaseException | None = None  # error that ended the thread of start()
        self._drained = Latch()
        self._ended = Latch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def state(self) -> LoopState:
        """Treatment of new requests."""
        return self._inbox.state

    @property
    def error(self) -> BaseException | None:
        """Error that stopped the loop by itself: a defect of the scheduler, or the loss of the last executor."""
        return self._inbox.error

    @property
    def num_unfinished(self) -> int:
        """Number of requests accepted that have not left."""
        return self._inbox.num_unfinished

    @property
    def num_in_flight(self) -> int:
        """Number of batches handed to executors and not yet returned."""
        return self._dispatcher.num_in_flight

    def submit(self, request: Request, request_id: str) -> None:
        """Accept ``request``; it is admitted in the loop's next step. From any thread, also from the listener.

        If the scheduler refuses it there, it finishes as FAILED with the scheduler's error.

        Raises:
            LoopClosedError: the loop is draining or has stopped.
            InvalidInputError: ``request_id`` belongs to an unfinished request, or is not ``request.request_id``.
        """
        try:
            self._inbox.submit(request, request_id)
        finally:  # also if refused: a drain may have seen the request before it was taken back
            self._ring()

    def cancel(self, request_id: str) -> None:
        """Ask for a request to leave as CANCELLED; unknown and finished ids are ignored. From any thread."""
        if self._inbox.cancel(request_id):
            self._ring()

    def call(self, function: Callable[[], None]) -> None:
        """Have the loop's thread call ``function`` in its next step, before any request that is submitted later.

        For changes of what the scheduler may run; from any thread. What it raises stops the loop.
        """
        self._inbox.call(function)
        self._ring()

    def step(self, *, until_s: float | None = None) -> bool:
        """Run one step: admit, fill the workers, wait for one completion, update the scheduler, tell the listener.

        A loop that runs by itself fills the workers again before it tells the listener.

        Blocks in between while there is nothing to do: until a completion, ``submit``, ``cancel``, the scheduler's
        ``wake_at``, or ``until_s`` (seconds of the loop's clock).

        Returns:
            Whether anything was admitted, submitted or completed.

        Raises:
            LoopClosedError: the loop has stopped.
            Exception: a defect of the scheduler, or the loss of the last executor; every unfinished request was failed
                with it and the loop has stopped.
        """
        return self._step_by_hand(until_s, is_drain=until_s is None)

    def _step_by_hand(self, until_s: float | None, *, is_drain: bool) -> bool:
        self._claim("another thread drives this loop: only it may call step()")
        try:
            return self._step(until_s, is_drain=is_drain)
        finally:
            self._runner = None
            if self._is_stopping:  # asked for during this step
                self._end()
            self._driving.release()

    def run_forever(self) -> None:
        """Step until :meth:`stop`; in the calling thread. Blocks, without spinning, while there is nothing to do.

        Raises:
            ServingError: the loop runs already.
            Exception: as :meth:`step`.
        """
        self._claim("the loop runs already: one thread drives it")
        self._is_running = True
        self._run(reraise=True)

    def start(self) -> Self:
        """Run in a daemon thread until :meth:`stop`; ``drain`` or ``stop`` raise an error that ends it early.

        Raises:
            ServingError: the loop runs already, or has stopped.
        """
        self._claim("the loop runs already: one thread drives it")
        self._is_running = True
        thread = threading.Thread(target=self._run, kwargs={"reraise": False}, name="serving-loop", daemon=True)
        thread.start()
        return self

    def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests and finish those accepted; return then, or after ``timeout_s``. Does not stop the loop.

        If the loop does not run in another thread, this call drives it; ``drain(0)`` only begins, and may be called
        from a signal handler.

        Returns:
            Whether every request accepted has left by being served, not by stopping.

        Raises:
            ServingError: called from the listener.
            Exception: the error that ended the thread of :meth:`start`; as :meth:`step` if this call drives the loop.
        """
        if self._runner == threading.get_ident():
            raise ServingError("drain() would wait for the step it is called from: call it from another thread")
        self._inbox.refuse()
        if self._is_running:
            self._interrupt()  # in any case: a signal handler may have come in between _ring()'s note and its deed
            self._drained.wait(timeout_s)
        elif self._inbox.state is LoopState.DRAINING:
            until_s = None if timeout_s is None else self._clock.now() + timeout_s
            with suppress(LoopClosedError):  # a signal handler stopped it between two steps
                while self._may_have_work and (until_s is None or self._clock.now() < until_s):
                    self._step_by_hand(until_s, is_drain=True)
        self._raise_once()
        return not self._may_have_work and not self._inbox.was_aborted

    @property
    def _may_have_work(self) -> bool:
        # Another thread's step by hand may have let the last request leave, and has yet to tell the listener.
        return bool(self.num_unfinished) or (self._runner is not None and not self._drained.is_set)

    def stop(self, timeout_s: float | None = None) -> None:
        """Stop now: unfinished requests leave as CANCELLED, executors are closed. Idempotent.

        From any thread. From the listener, and from a signal handler of the thread that runs the loop, it only asks:
        the loop stops after the step in progress.

        Raises:
            ServingError: the loop did not stop within ``timeout_s``; it will once its executor returns.
            Exception: the error that ended the thread of :meth:`start`, if it was not raised yet.
        """
        self._is_stopping = True
        self._interrupt()
        if self._runner == threading.get_ident():
            return
        if self._is_running or self._runner is not None:
            if not self._ended.wait(timeout_s):
                raise ServingError(f"the loop did not stop within {timeout_s} s: an executor has not returned")
        else:
            self._end()
        self._raise_once()

    def _step(self, until_s: float | None, *, is_drain: bool = False) -> bool:
        """Take a step; one that ``is_drain`` waits for nothing once the loop is drained, or has let the last leave."""
        try:
            num_taken = self._fill()
            is_idle = is_drain and num_taken and not self.num_unfinished and not self.num_in_flight
            done = None if is_idle else self._wait(until_s, is_drain=is_drain)  # the last request was just cancelled
            self._is_waiting = False
            if done is not None:
                tell = self._dispatcher.update_from_output(done)
                try:
                    if self._is_running:  # a caller of step() may still submit requests at this moment
                        self._fill()  # the worker computes on while the listener is called
                finally:
                    tell()
        except Exception as error:
            self._abort(FinishReason.FAILED, error)
            raise
        self._note_drained()
        return bool(num_taken or done)

    def _fill(self) -> int:
        """Admit new requests and fill the workers; return the number of messages and batches."""
        now = self._clock.now()
        num_admitted = self._admit(now)
        return num_admitted + self._dispatcher.fill(now)

    def _admit(self, now: float) -> int:
        """Bring requests and cancellations from the inbox to the scheduler; return their number."""
        is_draining = self._inbox.state is LoopState.DRAINING
        messages = self._inbox.take()
        for request_id, request in messages:
            if request is Cancel.CANCEL:
                self._tell_finished(self._scheduler.cancel(request_id, now), now)
                continue
            if isinstance(request, Call):
                request.function()
                continue
            try:
                self._scheduler.add(request, now)
            except MlsysError as error:
                self._tell_finished([Finished(request_id, FinishReason.FAILED, error=error)], now)
        if is_draining and self._draining is not None and self._scheduler.num_unfinished == self._inbox.num_unfinished:
            self._draining.drain(now)  # not while a request that was just accepted is still on its way
            self._draining = None
        if self._expiring is not None:
            self._tell_finished(self._expiring.expire(now), now)
        return len(messages)

    def _wait(self, until_s: float | None, *, is_drain: bool) -> Completion[Batch, Output] | Lost | None:
        self._is_waiting = True  # before the look at the inbox: who comes later rings
        if self._inbox or self._is_stopping:  # came since, in this very thread: no interrupt is needed to see it
            return None
        # Once the last request has left, who drives by hand must not block: nothing will come.
        if self._note_drained() or (is_drain and self._drained.is_set):
            return None
        done = self._dispatcher.wait(self._clock.now(), until_s)
        if done is None:
            self._has_rung = False
        return done

    def _note_drained(self) -> bool:
        """Record the end of a drain; return True the first time."""
        if self._inbox.state is not LoopState.DRAINING or self._inbox.num_unfinished or self._drained.is_set:
            return False
        self._drained.set()
        return True

    def _ring(self) -> None:
        """Make the loop look at its inbox."""
        if self._has_rung or (self._runner == threading.get_ident() and not self._is_waiting):
            return
        self._has_rung = True
        self._interrupt()

    def _interrupt(self) -> None:
        try:
            self._dispatcher.interrupt()
        except Exception:  # not the caller's fault; the loop finds out by itself when it waits
            _logger.exception("an executor could not be interrupted")

    def _tell_finished(self, finished: Sequence[Finished[Any]], now: float) -> None:
        for each in finished:
            self._inbox.leave(each.request_id)
            self._listener.on_finished(each, now)
        if finished and self._recorder is not None:
            self._recorder.count("unfinished requests", self._inbox.num_unfinished)

    def _abort(self, reason: FinishReason, error: BaseException | None) -> None:
        """Let every unfinished request leave, and accept no more."""
        request_ids = self._inbox.close(error)
        now = self._clock.now()
        for request_id in request_ids:
            self._listener.on_finished(Finished(request_id, reason, error=error), now)

    def _claim(self, refusal: str) -> None:
        """Become the thread that drives the loop; raise LoopClosedError if it has stopped, or ``refusal``."""
        if not self._driving.acquire(blocking=False):
            raise ServingError(refusal)
        self._runner = threading.get_ident()
        if self._is_stopping or self._inbox.state is LoopState.STOPPED:  # stop() writes, then looks at the runner
            self._runner = None
            self._end()
            self._driving.release()
            raise LoopClosedError("the loop has stopped: make a new one")

    def _run(self, *, reraise: bool) -> None:
        self._runner = threading.get_ident()
        try:
            while not self._is_stopping:
                self._step(None)
        except BaseException as error:
            if reraise:
                raise
            _logger.exception("the serving loop has stopped")
            self._unraised = error
        finally:
            self._end()
            self._driving.release()

    def _end(self) -> None:
        try:
            self._abort(FinishReason.CANCELLED, None)
            self._drained.set()  # only now: who waits in drain() must find what ended the loop
            self._dispatcher.close()
        finally:  # a signal handler may raise while an executor is waited for
            self._ended.set()  # before the rest: a signal handler of this very thread must not wait for it
            self._is_running = False
            self._runner = None

    def _raise_once(self) -> None:
        error, self._unraised = self._unraised, None
        if error is not None:
            raise error
