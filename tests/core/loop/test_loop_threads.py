"""The loop with real threads and the wall clock. Nothing here asserts on how long anything takes."""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from mlsys_core.errors import ServingError
from mlsys_core.loop import (
    Finished,
    FinishReason,
    InlineExecutor,
    LoopClosedError,
    LoopState,
    ServeRequest,
    ServingLoop,
    ThreadExecutor,
    WallClock,
    WorkerId,
)
from mlsys_core.loop.baselines import Bucketed, DelayBatch, RequestBatch, StaticBatch, ZeroBatch

PATIENCE_S = 1200.0  # ends a hang; nothing is decided by it
Batch = RequestBatch[Any]


def names(batch: Batch) -> list[str]:
    return [each.request_id for each in batch.requests]


class Ledger:
    """Counts how often each request finished, and lets other threads wait for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.finished: list[Finished[Any]] = []

    def on_output(self, batch: Any, output: Any, now: float) -> None:
        pass

    def on_finished(self, finished: Finished[Any], now: float) -> None:
        with self._changed:
            self.finished.append(finished)
            self._changed.notify_all()

    def wait_for(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.finished) >= number, PATIENCE_S)

    @property
    def reasons(self) -> dict[str, FinishReason]:
        return {finished.request_id: finished.reason for finished in self.finished}


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + PATIENCE_S
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not left


class Entered(ZeroBatch[Any, Any]):
    """A scheduler that tells when the loop is about to wait."""

    def __init__(self) -> None:
        super().__init__(max_batch_size=1)
        self.entered, self.num_waits = threading.Event(), 0

    def wake_at(self, now: float) -> float | None:
        self.num_waits += 1
        self.entered.set()
        return super().wake_at(now)

    def then(self, act: Callable[[], None]) -> None:
        """Have a thread act when the loop waits."""
        threading.Thread(target=lambda: self.entered.wait(PATIENCE_S) and act()).start()


def submit(loop: ServingLoop[Any, Any, Any], name: str) -> None:
    loop.submit(ServeRequest(name, None), name)


@pytest.mark.parametrize(
    "make_executors",
    [
        lambda: [ThreadExecutor(names, max_in_flight=2)],
        lambda: [ThreadExecutor(names, max_in_flight=depth) for depth in (1, 2, 3)],
        lambda: [InlineExecutor(names)],
        lambda: [InlineExecutor(names, max_in_flight=2) for _ in range(2)],
    ],
    ids=["one thread", "three threads", "inline", "two inline"],
)
def test_many_threads_submit_and_cancel(make_executors: Callable[[], list[Any]]) -> None:
    ledger, num_clients, num_requests = Ledger(), 4, 150

    def client(number: int) -> None:
        rng = random.Random(number)
        for index in range(num_requests):
            name = f"{number}-{index}"
            submit(loop, name)
            if rng.random() < 0.3:
                loop.cancel(name)
            if rng.random() < 0.3:
                loop.cancel(f"{rng.randrange(num_clients)}-{rng.randrange(num_requests)}")

    loop = ServingLoop[Any, Any, Any](
        DelayBatch(max_batch_size=8, delay_s=0.001), make_executors(), WallClock(), listener=ledger
    )
    with loop.start():
        clients = [threading.Thread(target=client, args=(number,)) for number in range(num_clients)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(PATIENCE_S)
        assert loop.drain(PATIENCE_S)
    counts = Counter(finished.request_id for finished in ledger.finished)
    assert counts == Counter({f"{n}-{i}": 1 for n in range(num_clients) for i in range(num_requests)})
    assert {finished.reason for finished in ledger.finished} <= {FinishReason.DONE, FinishReason.CANCELLED}
    for finished in ledger.finished:
        assert finished.result == (finished.request_id if finished.reason is FinishReason.DONE else None)


def test_an_idle_loop_blocks_and_wakes_for_a_request() -> None:
    scheduler, ledger = Entered(), Ledger()
    with ServingLoop[Any, Any, Any](scheduler, ThreadExecutor(names), WallClock(), listener=ledger).start() as loop:
        for index in range(5):
            before = scheduler.num_waits
            time.sleep(0.03)  # a loop that spins would wait thousands of times meanwhile
            assert scheduler.num_waits - before <= 2
            submit(loop, str(index))
            ledger.wait_for(index + 1)
        assert scheduler.num_waits > 5


def test_a_call_comes_in_order_with_submissions_and_wakes_an_idle_loop() -> None:
    scheduler: ZeroBatch[Any] = ZeroBatch(max_batch_size=8)
    seen: list[int] = []
    loop = ServingLoop(scheduler, InlineExecutor(names), WallClock())
    loop.submit(ServeRequest("a", None), "a")
    loop.call(lambda: seen.append(scheduler.num_unfinished))
    loop.submit(ServeRequest("b", None), "b")
    loop.step()
    assert seen == [1]
    called = threading.Event()
    with loop.start():
        loop.call(called.set)
        assert called.wait(PATIENCE_S)
    loop.call(lambda: seen.append(0))
    assert seen == [1]


def test_a_window_ends_without_any_event() -> None:
    ledger = Ledger()
    scheduler = DelayBatch[Any, Any](max_batch_size=8, delay_s=0.01)
    with ServingLoop[Any, Any, Any](scheduler, ThreadExecutor(names), WallClock(), listener=ledger).start() as loop:
        submit(loop, "a")
        ledger.wait_for(1)
    assert ledger.reasons == {"a": FinishReason.DONE}


def test_a_deadline_ends_without_any_event() -> None:
    ledger, clock = Ledger(), WallClock()
    scheduler = DelayBatch[Any, Any](max_batch_size=8, delay_s=1e6)
    with ServingLoop[Any, Any, Any](scheduler, ThreadExecutor(names), clock, listener=ledger).start() as loop:
        loop.submit(ServeRequest("a", None, deadline_s=clock.now() + 0.01), "a")
        ledger.wait_for(1)
    assert ledger.reasons == {"a": FinishReason.EXPIRED}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_stop_tells_everyone_before_the_batch_at_work_is_over(num_workers: int) -> None:
    started, release = threading.Semaphore(0), threading.Event()

    def work(batch: Batch) -> list[str]:
        started.release()
        assert release.wait(PATIENCE_S)
        return names(batch)

    ledger = Ledger()
    executors = [ThreadExecutor(work) for _ in range(num_workers)]
    loop = ServingLoop[Any, Any, Any](ZeroBatch(max_batch_size=1), executors, WallClock(), listener=ledger).start()
    for index in range(5):
        submit(loop, str(index))
    for _ in range(num_workers):
        assert started.acquire(timeout=PATIENCE_S)
    stopper = threading.Thread(target=loop.stop)
    stopper.start()
    ledger.wait_for(5)  # while the batches are still at work
    assert set(ledger.reasons.values()) == {FinishReason.CANCELLED}
    assert not release.is_set()
    with pytest.raises(LoopClosedError):
        submit(loop, "late")
    release.set()
    stopper.join(PATIENCE_S)
    assert not stopper.is_alive()
    assert len(ledger.finished) == 5


def test_stop_says_when_an_executor_does_not_return() -> None:
    started, release = threading.Event(), threading.Event()

    def work(batch: Batch) -> list[str]:
        started.set()
        release.wait(PATIENCE_S)
        return names(batch)

    loop = ServingLoop[Any, Any, Any](ZeroBatch(max_batch_size=1), InlineExecutor(work), WallClock()).start()
    submit(loop, "a")
    assert started.wait(PATIENCE_S)
    with pytest.raises(ServingError, match=r"did not stop within 0.01 s"):
        loop.stop(timeout_s=0.01)
    release.set()
    loop.stop()
    assert loop.state is LoopState.STOPPED


def test_drain_from_another_thread_finishes_what_was_accepted() -> None:
    release, ledger = threading.Event(), Ledger()

    def work(batch: Batch) -> list[str]:
        assert release.wait(PATIENCE_S)
        return names(batch)

    with ServingLoop[Any, Any, Any](
        ZeroBatch(max_batch_size=2), ThreadExecutor(work), WallClock(), listener=ledger
    ).start() as loop:
        for index in range(5):
            submit(loop, str(index))
        assert not loop.drain(timeout_s=0.01)
        with pytest.raises(LoopClosedError, match="draining"):
            submit(loop, "late")
        release.set()
        assert loop.drain(PATIENCE_S)
        assert loop.drain(PATIENCE_S)  # again
    assert ledger.reasons == {str(index): FinishReason.DONE for index in range(5)}


def test_drain_of_an_idle_loop_returns() -> None:
    with ServingLoop[Any, Any, Any](ZeroBatch(max_batch_size=2), ThreadExecutor(names), WallClock()).start() as loop:
        assert loop.drain(PATIENCE_S)


def test_drain_ends_when_the_last_request_leaves_without_a_batch() -> None:
    class Stubborn(StaticBatch[Any, Any]):
        def drain(self, now: float) -> None:
            """Goes on waiting for a full batch."""

    ledger, clock = Ledger(), WallClock()
    executors = [ThreadExecutor(names)]
    with ServingLoop[Any, Any, Any](Stubborn(batch_size=2), executors, clock, listener=ledger).start() as loop:
        loop.submit(ServeRequest("a", None, deadline_s=clock.now() + 0.02), "a")
        assert loop.drain(PATIENCE_S)
    assert ledger.reasons == {"a": FinishReason.EXPIRED}


@pytest.mark.parametrize("then", ["submit", "stop"])
def test_a_listeners_calls_during_admission_need_no_other_event(then: str) -> None:
    class Reacting(Ledger):
        def on_finished(self, finished: Finished[Any], now: float) -> None:
            super().on_finished(finished, now)
            if finished.request_id == "too long":
                if then == "submit":
                    submit(loop, "short")
                else:
                    loop.stop()

    ledger = Reacting()
    loop = ServingLoop[Any, Any, Any](
        Bucketed(max_batch_size=1, max_length=5), ThreadExecutor(names), WallClock(), listener=ledger
    ).start()
    loop.submit(ServeRequest("too long", None, length=6), "too long")  # refused as soon as the loop looks at it
    if then == "submit":
        ledger.wait_for(2)
        loop.stop()
    assert loop._ended.wait(PATIENCE_S)
    assert [finished.request_id for finished in ledger.finished] == (
        ["too long", "short"] if then == "submit" else ["too long"]
    )


def test_two_workers_work_at_the_same_time() -> None:
    meet = threading.Barrier(2)

    def work(batch: Batch) -> list[str]:
        meet.wait(PATIENCE_S)  # passes only with both at work
        return names(batch)

    ledger = Ledger()
    executors = [ThreadExecutor(work), ThreadExecutor(work)]
    with ServingLoop[Any, Any, Any](
        ZeroBatch(max_batch_size=1), executors, WallClock(), listener=ledger
    ).start() as loop:
        for name in "abcd":
            submit(loop, name)
        assert loop.drain(PATIENCE_S)
    assert ledger.reasons == dict.fromkeys("abcd", FinishReason.DONE)


def test_the_next_batch_is_scheduled_while_one_runs() -> None:
    """With ``max_in_flight=2`` the second batch is with the executor before the first has ended."""
    second_given, ledger = threading.Event(), Ledger()

    class Watching(ZeroBatch[Any, Any]):
        num_batches = 0

        def next_batch(self, worker: WorkerId, now: float) -> Any:
            batch = super().next_batch(worker, now)
            self.num_batches += batch is not None
            if self.num_batches == 2:
                second_given.set()
            return batch

    def work(batch: Batch) -> list[str]:
        assert second_given.wait(PATIENCE_S)
        return names(batch)

    executor = ThreadExecutor(work, max_in_flight=2)
    with ServingLoop[Any, Any, Any](Watching(max_batch_size=1), executor, WallClock(), listener=ledger).start() as loop:
        submit(loop, "a")
        submit(loop, "b")
        assert loop.drain(PATIENCE_S)
    assert ledger.reasons == dict.fromkeys("ab", FinishReason.DONE)


@pytest.mark.parametrize("owners_call", ["drain", "stop"])
def test_a_defect_ends_the_thread_and_is_raised_once_to_the_owner(
    owners_call: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Defective(ZeroBatch[Any, Any]):
        def next_batch(self, worker: WorkerId, now: float) -> Any:
            if super().num_unfinished:
                raise ZeroDivisionError("a defect")

    ledger = Ledger()
    loop = ServingLoop[Any, Any, Any](Defective(max_batch_size=1), ThreadExecutor(names), WallClock(), listener=ledger)
    loop.start()
    submit(loop, "a")
    ledger.wait_for(1)
    assert ledger.reasons == {"a": FinishReason.FAILED}
    with pytest.raises(ZeroDivisionError):
        getattr(loop, owners_call)()
    loop.stop()
    assert isinstance(loop.error, ZeroDivisionError)
    assert "the serving loop has stopped" in caplog.text


def test_one_thread_drives_a_loop() -> None:
    loop = ServingLoop[Any, Any, Any](ZeroBatch(max_batch_size=1), ThreadExecutor(names), WallClock())
    with loop.start():
        for start in (loop.start, loop.run_forever):
            with pytest.raises(ServingError, match="runs already"):
                start()
        ready = threading.Event()
        loop_thread = next(thread for thread in threading.enumerate() if thread.name == "serving-loop")
        while loop._runner != loop_thread.ident and not ready.wait(0.001):
            pass
        with pytest.raises(ServingError, match="another thread drives this loop"):
            loop.step()


def test_run_forever_in_the_owners_thread_ends_by_stop_from_another() -> None:
    ledger = Ledger()
    loop = ServingLoop[Any, Any, Any](ZeroBatch(max_batch_size=1), ThreadExecutor(names), WallClock(), listener=ledger)

    def client() -> None:
        submit(loop, "a")
        ledger.wait_for(1)
        loop.stop()

    thread = threading.Thread(target=client)
    thread.start()
    loop.run_forever()
    thread.join(PATIENCE_S)
    assert ledger.reasons == {"a": FinishReason.DONE}
    assert loop.state is LoopState.STOPPED


def test_a_signal_handler_of_the_loops_thread_may_stop_it() -> None:
    scheduler = Entered()
    loop = ServingLoop[Any, Any, Any](scheduler, ThreadExecutor(names), WallClock())
    before = signal.signal(signal.SIGUSR1, lambda *_: loop.stop())
    try:
        scheduler.then(lambda: os.kill(os.getpid(), signal.SIGUSR1))
        loop.run_forever()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert loop.state is LoopState.STOPPED


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize(
    "make", [lambda: ThreadExecutor(names), lambda: InlineExecutor(names)], ids=["thread", "inline"]
)
def test_a_handler_runs_though_its_signal_did_not_end_the_wait(make: Callable[[], Any], num_workers: int) -> None:
    """A signal just before the thread blocks, or one that another thread takes: the wait goes on and knows nothing."""
    scheduler = Entered()
    loop = ServingLoop[Any, Any, Any](scheduler, [make() for _ in range(num_workers)], WallClock())
    before = signal.signal(signal.SIGUSR1, lambda *_: loop.stop())

    def kill() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # it is delivered to this thread
        signal.raise_signal(signal.SIGUSR1)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        scheduler.then(kill)
        loop.run_forever()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        signal.signal(signal.SIGUSR1, before)
    assert loop.state is LoopState.STOPPED


@pytest.mark.parametrize("wait", ["drain", "stop"])
def test_a_handler_runs_while_the_main_thread_waits_for_the_loops_end(wait: str) -> None:
    gate = threading.Event()
    loop = ServingLoop[Any, Any, Any](
        ZeroBatch(max_batch_size=1), ThreadExecutor(lambda _: [gate.wait(PATIENCE_S)]), WallClock()
    )
    before = signal.signal(signal.SIGUSR1, lambda *_: gate.set())

    def kill() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        signal.raise_signal(signal.SIGUSR1)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        loop.start()
        submit(loop, "a")
        while loop.num_in_flight != 1:
            time.sleep(0.001)
        threading.Thread(target=kill).start()
        if wait == "drain":
            assert loop.drain()
        loop.stop()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        signal.signal(signal.SIGUSR1, before)
    assert loop.state is LoopState.STOPPED


def test_a_step_by_hand_ends_by_stop_from_another_thread() -> None:
    scheduler = Entered()
    loop = ServingLoop[Any, Any, Any](scheduler, ThreadExecutor(names), WallClock())
    scheduler.then(loop.stop)
    while loop.state is not LoopState.STOPPED:
        loop.step()
    with pytest.raises(LoopClosedError):
        loop.step()


def test_a_loop_that_never_ran_stops_and_cancels() -> None:
    ledger = Ledger()
    with ServingLoop[Any, Any, Any](
        ZeroBatch(max_batch_size=1), [ThreadExecutor(names), ThreadExecutor(names)], WallClock(), listener=ledger
    ) as loop:
        submit(loop, "a")
    assert ledger.reasons == {"a": FinishReason.CANCELLED}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_worker_has_its_next_batch_before_the_listener_hears_of_the_last(num_workers: int) -> None:
    gate, in_flight = threading.Event(), []

    class Noting:
        def on_output(self, batch: Any, output: Any, now: float) -> None:
            gate.set()

        def on_finished(self, finished: Any, now: float) -> None:
            in_flight.append(loop.num_in_flight)

    def run(batch: Any) -> list[None]:
        if batch.requests[0].request_id != "0":
            gate.wait(PATIENCE_S)  # the others last until the first is reported
        return [None]

    executors = [ThreadExecutor(run) for _ in range(num_workers)]
    loop = ServingLoop(ZeroBatch(max_batch_size=1), executors, WallClock(), listener=Noting())
    with loop:
        for number in range(4):
            loop.submit(ServeRequest(str(number), None), str(number))
        loop.start()
        assert loop.drain(PATIENCE_S)
    assert in_flight[0] == num_workers
