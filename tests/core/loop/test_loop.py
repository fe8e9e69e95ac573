"""The loop's contract, driven step by step: refusals, failures, lost executors, cancellation, the end."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.loop import (
    Collector,
    Finished,
    FinishReason,
    InlineExecutor,
    LoopClosedError,
    LoopState,
    QueueFullError,
    ServeRequest,
    ServingLoop,
    SimulatedExecutor,
    VirtualClock,
    WallClock,
    WorkerId,
)
from mlsys_core.loop.baselines import RequestBatch, StaticBatch, ZeroBatch

Batch = RequestBatch[Any]


def request(name: str, payload: Any = None, **fields: Any) -> ServeRequest[Any]:
    return ServeRequest(name, payload, **fields)


def names(batch: Batch) -> list[str]:
    return [each.request_id for each in batch.requests]


def inline_loop(
    scheduler: Any | None = None, fn: Callable[[Any], Any] = names, **options: Any
) -> tuple[ServingLoop[Any, Any, Any], Collector[Any, Any]]:
    collector = Collector[Any, Any]()
    scheduler = ZeroBatch[Any, Any](max_batch_size=2) if scheduler is None else scheduler
    return ServingLoop(scheduler, InlineExecutor(fn), WallClock(), listener=collector, **options), collector


def simulated_loop(
    scheduler: Any, *, cost_s: float = 1.0, num_workers: int = 1
) -> tuple[ServingLoop[Any, Any, Any], Collector[Any, Any], VirtualClock]:
    collector, clock = Collector[Any, Any](), VirtualClock()
    executors = [SimulatedExecutor[Any, Any](lambda _: cost_s, names) for _ in range(num_workers)]
    return ServingLoop(scheduler, executors, clock, listener=collector), collector, clock


def reasons(collector: Collector[Any, Any]) -> dict[str, FinishReason]:
    return {name: finished.reason for name, finished in collector.finished.items()}


def test_requests_go_through_and_drain_ends() -> None:
    loop, collector = inline_loop()
    states = [loop.state]
    with loop:
        for name in "abc":
            loop.submit(request(name), name)
        assert loop.num_unfinished == 3
        assert loop.drain()
        assert {name: each.result for name, each in collector.finished.items()} == {"a": "a", "b": "b", "c": "c"}
        assert collector.num_outputs == 2
        states.append(loop.state)
        with pytest.raises(LoopClosedError, match="'d' refused: the loop is draining"):
            loop.submit(request("d"), "d")
    states.append(loop.state)
    assert states == [LoopState.OPEN, LoopState.DRAINING, LoopState.STOPPED]
    with pytest.raises(LoopClosedError, match="has stopped"):
        loop.submit(request("d"), "d")
    with pytest.raises(LoopClosedError):
        loop.step()
    with pytest.raises(LoopClosedError):
        loop.start()


def test_who_steps_a_drained_loop_by_hand_gets_the_time_that_was_asked_for() -> None:
    loop, _, clock = simulated_loop(ZeroBatch[Any, Any](max_batch_size=1))
    assert loop.drain(0.0)
    for _ in range(2):  # one step may only note that the loop is drained
        loop.step(until_s=1.0)
    assert clock.now() == 1.0
    loop.step()  # nothing will come: it does not wait for it


class Times:
    """A listener, recorder and traces at once: what each was told, and at what time."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.spans: list[tuple[Any, ...]] = []
        self.unfinished: list[float] = []

    def on_output(self, batch: Batch, output: Any, now: float) -> None:
        self.told.append(("output", *output, now))

    def on_finished(self, finished: Finished[Any], now: float) -> None:
        self.told.append((finished.request_id, finished.reason, str(finished.error), now))

    def complete(self, name: str, start_ns: int, end_ns: int, /, *, track: str | None = None) -> None:
        self.spans.append((name, start_ns / 1e9, end_ns / 1e9, track))

    def count(self, name: str, value: float, /) -> None:
        assert name == "unfinished requests"
        self.unfinished.append(value)

    def on_batch(self, batch: Batch, started_s: float, ended_s: float) -> None:
        self.spans.append((*names(batch), started_s, ended_s))


class Asked(StaticBatch[Any, Any]):
    """Notes the time of each call but ``next_batch``."""

    def __init__(self) -> None:
        super().__init__(batch_size=1)
        self.calls: list[tuple[str, float]] = []
        for name in ("add", "cancel", "complete", "fail", "expire", "drain"):
            setattr(self, name, self._noted(name, getattr(self, name)))

    def _noted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            self.calls.append((name, arguments[-1]))
            return call(*arguments)

        return noted


def test_scheduler_listener_recorder_and_traces_hear_the_loops_time() -> None:
    """Two batches in flight: the second begins when the first ends. One fails, one expires, one is left at the end."""

    def outputs(batch: Batch) -> list[str]:
        if names(batch) == ["bad"]:
            raise ValueError("bad")
        return names(batch)

    times, scheduler, clock = Times(), Asked(), VirtualClock()
    executor = SimulatedExecutor[Any, Any](lambda _: 2.0, outputs, max_in_flight=2)
    loop = ServingLoop[Any, Any, Any](scheduler, executor, clock, listener=times, recorder=times, traces=times)
    for name, deadline_s in (("a", None), ("bad", None), ("late", 1.0), ("left", None)):
        loop.submit(request(name, deadline_s=deadline_s), name)
    loop.drain(timeout_s=4.5)
    loop.stop()
    done, failed = ("a", FinishReason.DONE, "None"), ("bad", FinishReason.FAILED, "bad")
    late, left = ("late", FinishReason.EXPIRED, "None"), ("left", FinishReason.CANCELLED, "None")
    assert times.told == [(*late, 1.0), ("output", "a", 2.0), (*done, 2.0), (*failed, 4.0), (*left, 4.5)]
    assert times.spans == [
        ("batch", 0.0, 2.0, "worker 0.0"),
        ("a", 0.0, 2.0),
        ("batch", 0.0, 4.0, "worker 0.1"),
        ("bad", 2.0, 4.0),
    ]
    assert times.unfinished == [3, 2, 1]
    assert {name: {now for each, now in scheduler.calls if each == name} for name, _ in scheduler.calls} == {
        "add": {0.0}, "drain": {0.0}, "expire": {0.0, 1.0, 2.0, 4.0}, "complete": {2.0}, "fail": {4.0}
    }  # fmt: skip


def test_drain_tells_the_scheduler_that_no_more_will_come() -> None:
    loop, collector = inline_loop(StaticBatch[Any, Any](batch_size=4))
    with loop:
        loop.submit(request("a"), "a")
        assert loop.drain(timeout_s=10)
    assert reasons(collector) == {"a": FinishReason.DONE}


def test_drain_gives_up_after_its_timeout_and_stop_cancels_the_rest() -> None:
    loop, collector, clock = simulated_loop(ZeroBatch[Any, Any](max_batch_size=1), cost_s=3.0)
    for name in "ab":
        loop.submit(request(name), name)
    assert not loop.drain(timeout_s=4.0)
    assert clock.now() == 4.0
    assert reasons(collector) == {"a": FinishReason.DONE}
    loop.stop()
    assert reasons(collector) == {"a": FinishReason.DONE, "b": FinishReason.CANCELLED}
    loop.stop()
    assert not loop.drain()
    assert len(collector.finished) == 2
    assert loop.state is LoopState.STOPPED


def test_ids_must_be_free_and_the_requests_own() -> None:
    loop, collector = inline_loop()
    with loop:
        loop.submit(request("a"), "a")
        with pytest.raises(InvalidInputError, match="'a' is in use"):
            loop.submit(request("a"), "a")
        with pytest.raises(InvalidInputError, match="'b' was submitted as 'c'"):
            loop.submit(request("b"), "c")
        while loop.num_unfinished:
            loop.step()
        loop.submit(request("a"), "a")  # free again
        loop.drain()
    assert list(collector.finished) == ["a"]
    assert collector.num_outputs == 2


def test_a_refused_request_fails_alone() -> None:
    loop, collector = inline_loop(ZeroBatch[Any, Any](max_batch_size=2, max_waiting=1))
    with loop:
        for name in "ab":  # both before the first step: the second finds the queue full
            loop.submit(request(name), name)
        loop.drain()
    assert reasons(collector) == {"a": FinishReason.DONE, "b": FinishReason.FAILED}
    assert isinstance(collector.finished["b"].error, QueueFullError)


def test_a_failing_batch_fails_its_requests_alone() -> None:
    problem = ValueError("bad payload")

    def fn(batch: Batch) -> list[str]:
        if any(each.payload == "bad" for each in batch.requests):
            raise problem
        return names(batch)

    loop, collector = inline_loop(fn=fn)
    with loop:
        for name, payload in [("a", "ok"), ("b", "bad"), ("c", "ok")]:
            loop.submit(request(name, payload), name)
        loop.drain()
    assert reasons(collector) == {"a": FinishReason.FAILED, "b": FinishReason.FAILED, "c": FinishReason.DONE}
    assert collector.finished["a"].error is problem
    assert collector.num_outputs == 1


class Grumbler(Collector[Any, Any]):
    def on_output(self, batch: Any, output: Any, now: float) -> None:
        super().on_output(batch, output, now)
        raise RuntimeError("on_output of the listener")

    def on_finished(self, finished: Finished[Any], now: float) -> None:
        super().on_finished(finished, now)
        raise RuntimeError("on_finished of the listener")


def test_a_raising_listener_loses_nobody(caplog: pytest.LogCaptureFixture) -> None:
    collector = Grumbler()
    with ServingLoop[Any, Any, Any](
        ZeroBatch(max_batch_size=2), InlineExecutor(names), WallClock(), listener=collector
    ) as loop:
        for name in "abc":
            loop.submit(request(name), name)
        assert loop.drain()
    assert reasons(collector) == dict.fromkeys("abc", FinishReason.DONE)
    assert caplog.text.count("RuntimeError: on_output of the listener") == 2
    assert caplog.text.count("RuntimeError: on_finished of the listener") == 3


def test_the_listener_may_submit_cancel_and_stop() -> None:
    class Chain(Collector[Any, Any]):
        def on_finished(self, finished: Finished[Any], now: float) -> None:
            super().on_finished(finished, now)
            number = int(finished.request_id)
            if number < 3:
                loop.submit(request(str(number + 1)), str(number + 1))
                loop.submit(request(str(number + 101)), str(number + 101))
                loop.cancel(str(number + 101))
            elif number == 3:
                loop.submit(request("999"), "999")
                loop.stop()
                with pytest.raises(ServingError, match="from another thread"):
                    loop.drain()

    chain, clock = Chain(), VirtualClock()
    executor = SimulatedExecutor[Any, Any](lambda _: 1.0, names)
    loop = ServingLoop[Any, Any, Any](ZeroBatch(max_batch_size=1), executor, clock, listener=chain)
    loop.submit(request("0"), "0")
    while loop.state is not LoopState.STOPPED:
        loop.step()
    done = {"0", "1", "2", "3"}
    assert {name for name, reason in reasons(chain).items() if reason is FinishReason.DONE} == done
    assert set(reasons(chain)) - done == {"101", "102", "103", "999"}
    assert clock.now() == 4.0


def test_cancellation_at_every_point_leaves_one_finish_and_touches_no_other() -> None:
    """Two workers, five requests, one cancelled at each time of a grid through their whole life."""
    for victim in "abcde":
        for at_s in [index * 0.25 for index in range(20)]:
            loop, collector, clock = simulated_loop(ZeroBatch[Any, Any](max_batch_size=1), num_workers=2)
            for name in "abcde":
                loop.submit(request(name), name)
            if at_s == 0:
                loop.cancel(victim)  # before it was admitted
            while clock.now() < at_s and loop.num_unfinished:
                loop.step(until_s=at_s)
            was_finished = victim in collector.finished
            loop.cancel(victim)
            loop.cancel(victim)
            assert loop.drain()
            assert set(collector.finished) == set("abcde")
            for name, reason in reasons(collector).items():
                expected = FinishReason.CANCELLED if name == victim and not was_finished else FinishReason.DONE
                assert reason is expected, (victim, at_s, name)
            loop.stop()


def test_a_cancelled_request_that_waits_leaves_at_once_and_unknown_ids_are_ignored() -> None:
    loop, collector, _ = simulated_loop(ZeroBatch[Any, Any](max_batch_size=1), cost_s=10.0)
    for name in "ab":
        loop.submit(request(name), name)
    loop.step(until_s=1.0)
    loop.cancel("b")
    loop.cancel("nobody")
    loop.step(until_s=2.0)
    assert collector.finished_s == {"b": 1.0}
    loop.cancel("a")  # in flight: with its batch
    loop.drain()
    assert collector.finished_s == {"b": 1.0, "a": 10.0}
    assert reasons(collector) == dict.fromkeys("ab", FinishReason.CANCELLED)


class Defective(ZeroBatch[Any, Any]):
    """Raises in the method named."""

    def __init__(self, method: str) -> None:
        super().__init__(max_batch_size=1)
        setattr(self, method, self._raise)

    def _raise(self, *_: object) -> Any:
        raise ZeroDivisionError("a defect")


@pytest.mark.parametrize("method", ["add", "expire", "next_batch", "wake_at", "complete"])
def test_a_defect_of_the_scheduler_fails_everyone_and_is_raised(method: str) -> None:
    loop, collector = inline_loop(Defective(method))
    for name in "abc":
        loop.submit(request(name), name)
    with pytest.raises(ZeroDivisionError):
        loop.drain()
    assert reasons(collector) == dict.fromkeys("abc", FinishReason.FAILED)
    assert {each.error for each in collector.finished.values()} == {loop.error}
    assert isinstance(loop.error, ZeroDivisionError)
    with pytest.raises(LoopClosedError, match="has stopped: a defect"):
        loop.submit(request("d"), "d")
    loop.stop()
    assert len(collector.finished) == 3


def test_a_request_finished_twice_is_a_defect() -> None:
    class Twice(ZeroBatch[Any, Any]):
        def next_batch(self, worker: WorkerId, now: float) -> Any:
            batch = super().next_batch(worker, now)
            if batch is not None:
                self.complete_twice = self.complete
                self.complete = lambda *args: [*(done := self.complete_twice(*args)), *done]
            return batch

    loop, collector = inline_loop(Twice(max_batch_size=1))
    loop.submit(request("a"), "a")
    with pytest.raises(ServingError, match="finished request 'a', which is not unfinished"):
        loop.drain()
    assert list(collector.finished) == ["a"]
    loop.stop()


class Mortal:
    """An executor on virtual time that is lost in ``submit`` or ``wait``, or returns batches out of order."""

    max_in_flight = 2

    def __init__(self, dies_in: str, after: int) -> None:
        self._dies_in, self._left = dies_in, after
        self._inner = InlineExecutor[Any, Any](names, max_in_flight=2)
        self.closed = 0

    def _dies(self, where: str) -> bool:
        if where == self._dies_in:
            self._left -= 1
        return where == self._dies_in and self._left < 0

    def submit(self, batch: Any) -> None:
        if self._dies("submit"):
            raise OSError("the worker process is gone")
        self._inner.submit(batch)

    def wait(self, timeout_s: float | None) -> Any:
        if self._dies("wait"):
            raise OSError("the worker process is gone")
        done = self._inner.wait(timeout_s)
        if done is not None and self._dies("order"):
            return ("another batch", [])
        return done

    def interrupt(self) -> None:
        self._inner.interrupt()

    def close(self) -> None:
        self.closed += 1
        self._inner.close()
        raise OSError("cannot even be closed")


@pytest.mark.parametrize("dies_in", ["submit", "wait", "order"])
def test_losing_the_only_executor_fails_everyone_and_is_raised(dies_in: str) -> None:
    collector, executor = Collector[Any, Any](), Mortal(dies_in, after=2)
    loop = ServingLoop[Any, Any, Any](ZeroBatch(max_batch_size=1), executor, WallClock(), listener=collector)
    for index in range(8):
        loop.submit(request(str(index)), str(index))
    with pytest.raises(ServingError, match="no executor is left"):
        loop.drain()
    loop.stop()
    assert executor.closed == 1
    assert set(collector.finished) == {str(index) for index in range(8)}
    assert set(reasons(collector).values()) <= {FinishReason.DONE, FinishReason.FAILED}
    assert reasons(collector)["7"] is FinishReason.FAILED
    assert reasons(collector)["0"] is FinishReason.DONE


@pytest.mark.parametrize("dies_in", ["submit", "wait", "order"])
def test_the_other_workers_go_on_when_one_is_lost(dies_in: str) -> None:
    collector, mortal = Collector[Any, Any](), Mortal(dies_in, after=1)
    executors: Sequence[Any] = [mortal, InlineExecutor(names), InlineExecutor(names)]
    with ServingLoop[Any, Any, Any](ZeroBatch(max_batch_size=1), executors, WallClock(), listener=collector) as loop:
        for index in range(30):
            loop.submit(request(str(index)), str(index))
        assert loop.drain(timeout_s=60)
        assert loop.error is None
    assert mortal.closed == 1
    assert len(collector.finished) == 30
    failed = [finished for finished in collector.finished.values() if finished.reason is not FinishReason.DONE]
    assert 1 <= len(failed) <= 2  # what the lost one had in flight
    assert all(isinstance(finished.error, OSError | ServingError) for finished in failed)


def test_work_of_a_lost_executor_may_go_to_the_others_at_once() -> None:
    class Retrying(ZeroBatch[Any, Any]):
        def __init__(self) -> None:
            super().__init__(max_batch_size=1)
            self._again: list[Batch] = []
            self.fail = self._retry

        def _retry(self, batch: Batch, error: BaseException, now: float) -> Sequence[Finished[Any]]:
            self._again.append(batch)
            return ()

        def next_batch(self, worker: WorkerId, now: float) -> Batch | None:
            return self._again.pop() if self._again else super().next_batch(worker, now)

    def gone(_: object) -> float:
        raise OSError("gone")

    collector = Collector[Any, Any]()
    executors = [SimulatedExecutor[Any, Any](gone, names), SimulatedExecutor[Any, Any](lambda _: 1.0, names)]
    loop = ServingLoop[Any, Any, Any](Retrying(), executors, VirtualClock(), listener=collector)
    loop.submit(request("a"), "a")
    assert loop.drain()
    assert reasons(collector) == {"a": FinishReason.DONE}
    assert collector.finished_s == {"a": 1.0}


def test_ctrl_c_in_an_inline_batch_reaches_the_owner_and_everyone_is_told() -> None:
    def fn(batch: Batch) -> list[str]:
        raise KeyboardInterrupt

    loop, collector = inline_loop(fn=fn)
    for name in "abc":
        loop.submit(request(name), name)
    with pytest.raises(KeyboardInterrupt):
        loop.run_forever()
    assert reasons(collector) == dict.fromkeys("abc", FinishReason.CANCELLED)
    assert loop.state is LoopState.STOPPED


def test_executors_must_fit() -> None:
    executor = InlineExecutor[Any, Any](names)
    zero = InlineExecutor[Any, Any](names)
    zero.max_in_flight = 0
    simulated = SimulatedExecutor[Any, Any](lambda _: 1.0, names)
    cases: list[tuple[Any, str]] = [
        ([], "at least one executor"),
        ([executor, executor], "stands for two workers"),
        ([executor, zero], "executor 1 has max_in_flight=0"),
        ([simulated, executor], "cannot share a loop"),
    ]
    for executors, problem in cases:
        with pytest.raises(InvalidInputError, match=problem):
            ServingLoop(ZeroBatch[Any, Any](max_batch_size=1), executors, VirtualClock())


def test_step_says_whether_anything_happened() -> None:
    loop, _, clock = simulated_loop(ZeroBatch[Any, Any](max_batch_size=1))
    assert not loop.step(until_s=0.5)
    loop.submit(request("a"), "a")
    assert loop.step(until_s=0.75)  # admitted and submitted
    assert loop.num_in_flight == 1
    assert not loop.step(until_s=1.0)
    assert loop.step(until_s=2.0)  # completed
    assert (loop.num_in_flight, loop.num_unfinished, clock.now()) == (0, 0, 1.5)
