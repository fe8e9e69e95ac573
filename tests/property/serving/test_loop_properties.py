"""Whatever happens, in whatever order: every request leaves once, and each baseline keeps what it promises."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from mlsys_core.loop import (
    Finished,
    FinishReason,
    LoopState,
    ServeRequest,
    ServingLoop,
    SimulatedExecutor,
    Simulation,
    VirtualClock,
    WorkerId,
    simulate,
)
from mlsys_core.loop.baselines import Bucketed, DelayBatch, RequestBatch, StaticBatch, ZeroBatch

Batch = RequestBatch[None]
MAX_BATCH_SIZE = 3
POLICIES: dict[str, Callable[[], Any]] = {
    "zero": lambda: ZeroBatch(max_batch_size=MAX_BATCH_SIZE),
    "delay": lambda: DelayBatch(max_batch_size=MAX_BATCH_SIZE, delay_s=1.5),
    "static": lambda: StaticBatch(batch_size=MAX_BATCH_SIZE),
    "bucketed": lambda: Bucketed(max_batch_size=MAX_BATCH_SIZE, bucket_width=4),
    "bounded": lambda: ZeroBatch(max_batch_size=MAX_BATCH_SIZE, max_waiting=4),
}
TIMES = st.sampled_from([0.0, 0.0, 0.25, 0.5, 1.0, 2.0])  # coarse, so that events often meet


def output_of(batch: Batch, poison: frozenset[str] = frozenset()) -> list[str]:
    ids = [request.request_id for request in batch.requests]
    if poison & set(ids):
        raise ValueError("poisoned batch")
    return ids


def cost_of(batch: Batch) -> float:
    return 0.5 + 0.25 * batch.size


@dataclass(frozen=True)
class Script:
    """A whole run, as data."""

    policy: str
    depths: tuple[int, ...]  # max_in_flight of each worker
    num_stages: int
    trace: tuple[tuple[float, ServeRequest[None]], ...]
    cancellations: tuple[tuple[float, str], ...]
    poison: frozenset[str]  # requests whose batches fail


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    trace, now = [], 0.0
    for index in range(draw(st.integers(0, 14))):
        now += draw(TIMES)
        patience_s = draw(st.none() | st.none() | st.sampled_from([0.0, 0.5, 1.0, 3.0]))
        request = ServeRequest(
            f"r{index}",
            None,
            length=draw(st.integers(1, 12)),
            arrival_s=now,
            priority=draw(st.sampled_from([0, 0, 0, -1, 1])),
            deadline_s=None if patience_s is None else now + patience_s,
        )
        trace.append((now, request))
    victims = draw(st.lists(st.tuples(TIMES, st.integers(0, 15)), max_size=4))
    cancellations, at = [], 0.0
    for gap, victim in victims:
        at += gap * 2
        cancellations.append((at, f"r{victim}"))
    return Script(
        policy=draw(st.sampled_from(sorted(POLICIES))),
        depths=tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))),
        num_stages=draw(st.integers(1, 2)),
        trace=tuple(trace),
        cancellations=tuple(cancellations),
        poison=frozenset(draw(st.lists(st.sampled_from([f"r{index}" for index in range(14)]), max_size=2))),
    )


class Watch:
    """Stands before a scheduler and checks, whenever the loop is about to wait, that no worker idles in vain."""

    def __init__(self, scheduler: Any, num_workers: int) -> None:
        self._scheduler = scheduler
        self._num_workers = num_workers
        self._in_flight: Counter[int] = Counter()
        self.idle_while_waiting = 0

        self.add, self.cancel, self.expire = scheduler.add, scheduler.cancel, scheduler.expire
        self.drain = getattr(scheduler, "drain", lambda now: None)

    @property
    def num_unfinished(self) -> int:
        number: int = self._scheduler.num_unfinished
        return number

    def next_batch(self, worker: WorkerId, now: float) -> Any:
        batch = self._scheduler.next_batch(worker, now)
        self._in_flight[worker] += batch is not None
        return batch

    def complete(self, batch: Batch, output: Any, now: float) -> Any:
        self._in_flight[batch.worker] -= 1
        return self._scheduler.complete(batch, output, now)

    def fail(self, batch: Batch, error: BaseException, now: float) -> Any:
        self._in_flight[batch.worker] -= 1
        return self._scheduler.fail(batch, error, now)

    def wake_at(self, now: float) -> float | None:
        num_waiting = self._scheduler.num_unfinished - len(self._scheduler._in_flight)
        idle = [worker for worker in range(self._num_workers) if not self._in_flight[worker]]
        self.idle_while_waiting += bool(num_waiting and idle)
        wake_s: float | None = self._scheduler.wake_at(now)
        return wake_s


def run(script: Script) -> tuple[Simulation[Batch], Watch]:
    executors = [
        SimulatedExecutor[Batch, list[str]](
            [cost_of] * script.num_stages, lambda batch: output_of(batch, script.poison), max_in_flight=depth
        )
        for depth in script.depths
    ]
    watch = Watch(POLICIES[script.policy](), len(executors))
    trace: Any = script.trace
    return simulate(watch, executors, trace, cancellations=script.cancellations), watch


@settings(max_examples=250)
@given(scripts())
def test_nobody_is_lost_or_served_twice_and_everyone_leaves_for_the_right_reason(script: Script) -> None:
    simulation, watch = run(script)
    requests = {request.request_id: request for _, request in script.trace}
    assert Counter(served.request_id for served in simulation.requests) == Counter(list(requests))
    assert watch.num_unfinished == 0
    runs_of = Counter(request.request_id for each in simulation.runs for request in each.batch.requests)
    assert set(runs_of.values()) <= {1}
    cancelled = {name for _, name in script.cancellations}
    ends_s = {request.request_id: each.ended_s for each in simulation.runs for request in each.batch.requests}
    for served in simulation.requests:
        request, reason = requests[served.request_id], served.finished.reason
        deadline_s = request.deadline_s
        if served.request_id in ends_s:  # it was dispatched, and leaves exactly when its batch ends
            assert served.finished_s == ends_s[served.request_id]
        if reason is FinishReason.DONE:
            assert served.finished.result == served.request_id
            assert deadline_s is None or served.finished_s <= deadline_s
        elif reason is FinishReason.CANCELLED:
            assert served.request_id in cancelled
        elif reason is FinishReason.EXPIRED:
            assert deadline_s is not None
            if served.request_id in ends_s:
                assert served.finished_s > deadline_s
            else:  # found at its deadline, neither before nor after
                assert served.finished_s == deadline_s
        elif served.request_id in ends_s:
            assert str(served.finished.error) == "poisoned batch"
        else:
            assert script.policy == "bounded"
            assert served.finished_s == served.arrival_s


@settings(max_examples=250)
@given(scripts())
def test_batches_keep_the_bounds_the_order_and_the_promises_of_their_policy(script: Script) -> None:
    simulation, watch = run(script)
    dispatched = [request for each in simulation.runs for request in each.batch.requests]
    for each in simulation.runs:
        batch = each.batch
        assert 1 <= batch.size <= MAX_BATCH_SIZE
        assert batch.worker == each.worker
        assert max(request.length for request in batch.requests) <= batch.padded_length
        assert 0 <= batch.padding_waste < 1
        if script.policy == "bucketed":
            assert len({(request.length - 1) // 4 for request in batch.requests}) == 1
            assert batch.padded_length == (batch.requests[0].length - 1) // 4 * 4 + 4
        else:
            assert batch.padded_length == max(request.length for request in batch.requests)
    if script.policy in ("zero", "bounded"):
        assert watch.idle_while_waiting == 0  # work conservation
    if script.policy == "static":  # only what the final drain flushed may be short, and that comes last
        sizes = [each.batch.size for each in simulation.runs]
        assert all(size == MAX_BATCH_SIZE for size in sizes[:-1])
    # First come, first served among equals: of one priority (and bucket), ids leave the queue in order of admission.
    for bucket in range(3):
        for priority in (-1, 0, 1):
            equals = [
                int(request.request_id[1:])
                for request in dispatched
                if request.priority == priority and (script.policy != "bucketed" or (request.length - 1) // 4 == bucket)
            ]
            assert equals == sorted(equals)


@settings(max_examples=60)
@given(scripts())
def test_delay_batch_never_waits_longer_than_its_window_for_company(script: Script) -> None:
    script = Script("delay", script.depths, script.num_stages, script.trace, script.cancellations, script.poison)
    simulation, _ = run(script)
    for each in simulation.runs:
        oldest_s = min(request.arrival_s for request in each.batch.requests)
        full = each.batch.size == MAX_BATCH_SIZE
        others_in_flight = [
            other
            for other in simulation.runs
            if other.worker == each.worker and other.submitted_s < each.submitted_s <= other.ended_s
        ]
        if not full and not others_in_flight:  # its worker was idle all the while
            assert each.submitted_s <= oldest_s + 1.5


@settings(max_examples=60)
@given(scripts())
def test_equal_scripts_give_equal_runs(script: Script) -> None:
    first, again = run(script)[0], run(script)[0]
    assert [repr(served) for served in first.requests] == [repr(served) for served in again.requests]
    assert first.runs == again.runs


class LoopMachine(RuleBasedStateMachine):
    """Submits, cancels, lets time pass, loses executors, drains and stops, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.finished: Counter[str] = Counter()
        self.reasons: dict[str, FinishReason] = {}
        self.accepted: list[str] = []
        self.cancelled: set[str] = set()
        self.poison: set[str] = set()
        self.num_lost = 0
        self.doomed: set[int] = set()
        self.loop: ServingLoop[Any, Batch, list[str]]
        self.scheduler: Any = None

    @precondition(lambda self: self.scheduler is None)
    @rule(policy=st.sampled_from(sorted(POLICIES)), depths=st.lists(st.integers(1, 2), min_size=1, max_size=3))
    def begin(self, policy: str, depths: list[int]) -> None:
        self.scheduler = POLICIES[policy]()
        self.num_workers = len(depths)

        def cost(worker: int) -> Callable[[Batch], float]:
            def checked(batch: Batch) -> float:
                if worker in self.doomed:
                    raise OSError("the worker is gone")
                return cost_of(batch)

            return checked

        executors = [
            SimulatedExecutor[Batch, list[str]](
                cost(worker), lambda batch: output_of(batch, frozenset(self.poison)), max_in_flight=depth
            )
            for worker, depth in enumerate(depths)
        ]
        self.loop = ServingLoop(self.scheduler, executors, self.clock, listener=self)

    def on_output(self, batch: Batch, output: list[str], now: float) -> None:
        raise RuntimeError("a listener that always fails")

    def on_finished(self, finished: Finished[Any], now: float) -> None:
        self.finished[finished.request_id] += 1
        self.reasons[finished.request_id] = finished.reason
        raise RuntimeError("a listener that always fails")

    def _is_open(self) -> bool:
        return self.scheduler is not None and self.loop.state is LoopState.OPEN

    def _is_alive(self) -> bool:
        return self.scheduler is not None and self.loop.state is not LoopState.STOPPED

    @precondition(_is_open)
    @rule(length=st.integers(1, 12), patience_s=st.none() | TIMES, poisoned=st.sampled_from([False] * 5 + [True]))
    def submit(self, length: int, patience_s: float | None, poisoned: bool) -> None:
        name = f"r{len(self.accepted)}"
        deadline_s = None if patience_s is None else self.clock.now() + patience_s
        self.loop.submit(ServeRequest(name, None, length=length, deadline_s=deadline_s), name)
        self.accepted.append(name)
        if poisoned:
            self.poison.add(name)

    @precondition(_is_alive)
    @rule(number=st.integers(0, 20))
    def cancel(self, number: int) -> None:
        self.loop.cancel(f"r{number}")
        if f"r{number}" in self.accepted and not self.finished[f"r{number}"]:
            self.cancelled.add(f"r{number}")

    @precondition(_is_alive)
    @rule(seconds=TIMES)
    def time_passes(self, seconds: float) -> None:
        until_s = self.clock.now() + seconds
        while self.clock.now() < until_s:
            self.loop.step(until_s=until_s)

    @precondition(lambda self: self._is_alive() and len(self.doomed) < self.num_workers - 1)
    @rule(worker=st.integers(0, 2))
    def doom(self, worker: int) -> None:
        """From now on the worker's executor is lost as soon as it is given something; one is always left."""
        self.doomed.add(worker % self.num_workers)

    @precondition(_is_alive)
    @rule(timeout_s=st.sampled_from([0.0, 1.0, None]))
    def drain(self, timeout_s: float | None) -> None:
        ended = self.loop.drain(timeout_s)
        assert ended == (self.loop.num_unfinished == 0)
        assert ended or timeout_s is not None
        assert self.loop.state is LoopState.DRAINING

    @precondition(lambda self: self.scheduler is not None)
    @rule()
    def stop(self) -> None:
        unfinished = {name for name in self.accepted if not self.finished[name]}
        self.loop.stop()
        assert all(self.reasons[name] is FinishReason.CANCELLED for name in unfinished)

    @invariant()
    def nobody_is_lost_or_told_twice(self) -> None:
        assert set(self.finished.values()) <= {0, 1}
        left = [name for name in self.accepted if not self.finished[name]]
        assert self.scheduler is None or self.loop.num_unfinished == len(left)
        if self.scheduler is not None and self.loop.state is LoopState.STOPPED:
            assert not left

    def teardown(self) -> None:
        if self.scheduler is not None and self.loop.state is not LoopState.STOPPED:
            assert self.loop.drain()  # ends, whatever was done before
            assert all(self.finished[name] == 1 for name in self.accepted)
            assert self.scheduler.num_unfinished == 0
            for name in self.cancelled:
                assert self.reasons[name] is not FinishReason.DONE, name
            self.loop.stop()


TestLoop: Any = LoopMachine.TestCase
TestLoop.settings = settings(max_examples=80, stateful_step_count=30)
