"""Virtual time: pipelines, determinism, and what a simulation refuses. Timelines are worked out by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.loop import (
    Finished,
    FinishReason,
    ServeRequest,
    ServingLoop,
    SimulatedExecutor,
    VirtualClock,
    WallClock,
    WorkerId,
    simulate,
)
from mlsys_core.loop.baselines import RequestBatch, ZeroBatch
from mlsys_core.profiling.recorder import Recorder


class IterationFcfs:
    """ORCA's Algorithm 1 without the memory reservation; requests are (id, number of iterations)."""

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._remaining: dict[str, int] = {}  # in order of arrival
        self._running: set[str] = set()

    def add(self, request: tuple[str, int], now: float) -> None:
        self._remaining[request[0]] = request[1]

    def cancel(self, request_id: str, now: float) -> Sequence[Finished[Any]]:
        raise NotImplementedError

    def next_batch(self, worker: WorkerId, now: float) -> tuple[str, ...] | None:
        pool = [name for name in self._remaining if name not in self._running]
        batch = tuple(pool[: self._max_batch_size])
        self._running.update(batch)
        return batch or None

    def complete(self, batch: tuple[str, ...], output: None, now: float) -> Sequence[Finished[Any]]:
        self._running.difference_update(batch)
        for name in batch:
            self._remaining[name] -= 1
        done = [name for name in batch if not self._remaining[name]]
        for name in done:
            del self._remaining[name]
        return [Finished(name, FinishReason.DONE) for name in done]

    def fail(self, batch: tuple[str, ...], error: BaseException, now: float) -> Sequence[Finished[Any]]:
        raise error

    def wake_at(self, now: float) -> float | None:
        return None

    @property
    def num_unfinished(self) -> int:
        return len(self._remaining)


def one(_: object) -> float:
    return 1.0


def test_orca_figure_8a_a_pipeline_of_three_stages_has_no_bubbles() -> None:
    executor = SimulatedExecutor[tuple[str, ...], None]([one, one, one], lambda _: None)
    assert executor.max_in_flight == 3
    trace = [(0.0, (name, 3)) for name in "ABCDEF"]
    simulation = simulate(IterationFcfs(2), executor, trace, request_id=lambda request: request[0])
    assert ["".join(run.batch) for run in simulation.runs] == ["AB", "CD", "EF"] * 3
    for index, run in enumerate(simulation.runs):
        assert run.stages_s == tuple((float(index + stage), index + stage + 1.0) for stage in range(3))
    assert {served.request_id: served.finished_s for served in simulation.requests} == {
        **dict.fromkeys("AB", 9.0),
        **dict.fromkeys("CD", 10.0),
        **dict.fromkeys("EF", 11.0),
    }


def test_request_level_pipelining_of_one_batch_at_a_time_has_them() -> None:
    executor = SimulatedExecutor[tuple[str, ...], None]([one, one, one], lambda _: None, max_in_flight=1)
    trace = [(0.0, (name, 3)) for name in "ABCDEF"]
    simulation = simulate(IterationFcfs(2), executor, trace, request_id=lambda request: request[0])
    assert [run.started_s for run in simulation.runs] == [3.0 * index for index in range(9)]
    assert simulation.ended_s == 27.0


def test_a_slow_stage_holds_up_the_others() -> None:
    executor = SimulatedExecutor[tuple[str, ...], None]([one, lambda _: 3.0], lambda _: None, max_in_flight=3)
    trace = [(0.0, (name, 1)) for name in "ABC"]
    simulation = simulate(IterationFcfs(1), executor, trace, request_id=lambda request: request[0])
    assert [run.stages_s for run in simulation.runs] == [
        ((0.0, 1.0), (1.0, 4.0)),
        ((1.0, 2.0), (4.0, 7.0)),
        ((2.0, 3.0), (7.0, 10.0)),
    ]


def test_arrivals_are_met_exactly_though_their_times_do_not_add_up() -> None:
    trace = [(0.1 * index, (str(index), 1)) for index in range(1000)]
    executor = SimulatedExecutor[tuple[str, ...], None](lambda _: 0.05, lambda _: None)
    simulation = simulate(IterationFcfs(4), executor, trace, request_id=lambda request: request[0])
    assert [served.arrival_s for served in simulation.requests] == [at for at, _ in trace]
    assert [run.started_s for run in simulation.runs] == [at for at, _ in trace]


def test_executors_and_schedulers_of_equal_traces_give_equal_results() -> None:
    trace = [(index % 7 + index, ServeRequest(str(index), None)) for index in range(0, 70, 7)]
    executors = [
        SimulatedExecutor[RequestBatch[None], list[int]](
            lambda batch: 1.5 * batch.size, lambda batch: [0] * batch.size, max_in_flight=depth
        )
        for depth in (1, 2)
    ]
    first = simulate(ZeroBatch[None, int](max_batch_size=3), executors, trace)
    again = simulate(ZeroBatch[None, int](max_batch_size=3), executors, trace)  # executors begin anew
    assert first == again
    assert len(first.requests) == 10


def test_failing_outputs_fail_their_batch_only() -> None:
    def output(batch: Any) -> list[int]:
        if batch.requests[0].request_id == "b":
            raise ValueError("no b")
        return [1] * batch.size

    trace = [(0, ServeRequest("a", None)), (1, ServeRequest("b", None)), (2, ServeRequest("c", None))]
    simulation = simulate(
        ZeroBatch[None, int](max_batch_size=1), SimulatedExecutor[Any, Any](lambda _: 1.0, output), trace
    )
    done = [served.request_id for served in simulation.requests if served.finished.reason is FinishReason.DONE]
    assert done == ["a", "c"]
    assert str(simulation["b"].finished.error) == "no b"


def test_recorder_gets_a_span_per_batch_in_virtual_time() -> None:
    clock = VirtualClock()
    recorder = Recorder(clock_ns=lambda: round(clock.now() * 1e9))
    executor = SimulatedExecutor[Any, Any](lambda _: 2.0, lambda batch: [0] * batch.size, max_in_flight=2)
    trace = [(0, ServeRequest("a", None)), (1, ServeRequest("b", None))]
    simulate(ZeroBatch[None, int](max_batch_size=1), executor, trace, clock=clock, recorder=recorder)
    recording = recorder.recording()
    assert [(span.start_ns, span.end_ns, span.track.name) for span in recording.spans] == [
        (0, 2_000_000_000, "worker 0.0"),
        (1_000_000_000, 4_000_000_000, "worker 0.1"),  # overlaps, so it has a track of its own
    ]
    assert [(sample.at_ns, sample.value) for sample in recording.samples] == [(2_000_000_000, 1), (4_000_000_000, 0)]


def test_executor_alone_obeys_the_protocol() -> None:
    executor = SimulatedExecutor[str, str](lambda batch: float(len(batch)), str.upper, max_in_flight=2)
    clock = VirtualClock()
    executor.bind(WorkerId(0), clock, itertools.count())
    executor.submit("abc")
    executor.submit("de")
    assert executor.wait(1.0) is None
    assert clock.now() == 1.0
    assert executor.wait(None) == ("abc", "ABC")
    assert executor.wait(10.0) == ("de", "DE")
    assert clock.now() == 5.0
    assert executor.wait(math.inf) is None
    assert clock.now() == 5.0


class Hoarder(IterationFcfs):
    def next_batch(self, worker: WorkerId, now: float) -> tuple[str, ...] | None:
        return None


def test_limits_of_the_simulation_are_reported() -> None:
    executor = SimulatedExecutor[Any, Any](one, lambda _: None)
    with pytest.raises(ServingError, match=r"stuck at 2\.0 s: the scheduler keeps 1 requests"):
        simulate(Hoarder(1), executor, [(2.0, ("a", 1))], request_id=lambda request: request[0])
    with pytest.raises(InvalidInputError, match="'a' is in use"):
        simulate(
            ZeroBatch[None, int](max_batch_size=1),
            executor,
            [(0, ServeRequest("a", None)), (0, ServeRequest("a", None))],
        )
    with pytest.raises(InvalidInputError, match="need a VirtualClock, got a WallClock"):
        ServingLoop(ZeroBatch[None, int](max_batch_size=1), executor, WallClock())
    with pytest.raises(InvalidInputError, match="at least one stage"):
        SimulatedExecutor[Any, Any]([], lambda _: None)
    with pytest.raises(ServingError, match="no executor is left") as lost:
        simulate(
            ZeroBatch[None, int](max_batch_size=1),
            SimulatedExecutor[Any, Any](lambda _: -1.0, lambda _: None),
            [(0, ServeRequest("a", None))],
        )
    assert "stage 0 gave -1.0 s" in str(lost.value.__cause__)


def test_a_drain_that_cannot_end_says_so_instead_of_spinning() -> None:
    loop = ServingLoop(Hoarder(1), SimulatedExecutor[Any, Any](one, lambda _: None), VirtualClock())
    loop.submit(("a", 1), "a")
    with pytest.raises(ServingError, match="waits forever"):
        loop.drain()


class Counted(SimulatedExecutor[str, str]):
    """An executor on a clock of its own, two seconds a batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(lambda batch: 2.0, str.upper, **options)
        self.clock = VirtualClock()
        self.bind(WorkerId(1), self.clock, itertools.count(5))


def test_runs_are_numbered_and_say_who_ran_what_when() -> None:
    executor = Counted(max_in_flight=3)
    executor.submit("a")
    executor.clock.advance_to(1.0)
    executor.submit("b")
    assert executor.next_end_s == 2.0
    first, second = executor.runs
    assert (first.number, first.worker, first.batch, first.submitted_s, first.stages_s) == (5, 1, "a", 0, ((0, 2),))
    assert (second.number, second.submitted_s, second.started_s, second.ended_s) == (6, 1.0, 2.0, 4.0)
    executor.bind(WorkerId(0), VirtualClock(), itertools.count())
    assert executor.runs == []
    assert executor.next_end_s == math.inf


def test_a_wait_that_ends_with_the_batch_gets_it() -> None:
    executor = Counted()
    executor.submit("a")
    assert executor.wait(1.5) is None
    assert executor.clock.now() == 1.5
    assert executor.wait(0.5) == ("a", "A")
    assert executor.clock.now() == 2.0
    assert executor.wait(3.0) is None
    assert executor.clock.now() == 5.0
    with pytest.raises(ServingError, match="waits forever"):
        executor.wait(None)


def test_ended_work_is_given_without_going_back_in_time() -> None:
    executor = Counted()
    executor.submit("a")
    executor.clock.advance_to(7.0)
    assert executor.wait(0.0) == ("a", "A")
    assert executor.clock.now() == 7.0
    executor.submit("b")
    assert executor.next_end_s == 9.0
    assert executor.wait(-3.0) is None
    assert executor.clock.now() == 7.0, "a time-out in the past moves nothing"


def test_of_several_workers_the_first_to_end_comes_first_and_then_the_first_by_number() -> None:
    clock = VirtualClock()
    executors = [SimulatedExecutor[str, str](lambda batch: float(batch), lambda batch: batch) for _ in range(3)]
    workers = SimulatedExecutor.as_workers(executors, clock)
    for executor, cost in zip(executors, ("3", "2", "2"), strict=True):
        executor.submit(cost)
    assert [run.number for executor in executors for run in executor.runs] == [0, 1, 2]
    done = [workers.wait(None) for _ in range(3)]
    assert [(each.worker, each.batch, each.output) for each in done if each] == [
        (1, "2", "2"),
        (2, "2", "2"),
        (0, "3", "3"),
    ]
    assert clock.now() == 3.0
    with pytest.raises(ServingError, match="nothing is in flight"):
        workers.wait(None)
    assert workers.wait(math.inf) is None
    assert clock.now() == 3.0


@pytest.mark.parametrize("cost_s", [-0.5, math.inf, math.nan])
def test_a_cost_that_is_no_time_is_refused(cost_s: float) -> None:
    executor = SimulatedExecutor[str, str]([one, lambda _: cost_s], str.upper)
    with pytest.raises(InvalidInputError, match=rf"the cost model of stage 1 gave {cost_s} s for 'a'"):
        executor.submit("a")
    assert executor.runs == []
    free = SimulatedExecutor[str, str](lambda _: 0.0, str.upper)
    free.submit("a")
    assert free.wait(0.0) == ("a", "A")


def test_as_many_are_in_flight_as_stages_unless_told_otherwise() -> None:
    assert SimulatedExecutor[str, str]([one, one], str.upper).max_in_flight == 2
    assert SimulatedExecutor[str, str]([one, one], str.upper, max_in_flight=1).max_in_flight == 1
    assert SimulatedExecutor[str, str](one, str.upper).max_in_flight == 1
    with pytest.raises(InvalidInputError, match="max_in_flight"):
        SimulatedExecutor[str, str](one, str.upper, max_in_flight=0)


def simulated(trace: Any, **options: Any) -> Any:
    executor = SimulatedExecutor[Any, Any](lambda _: 2.0, lambda batch: [0] * batch.size)
    return simulate(ZeroBatch[None, int](max_batch_size=1), executor, trace, **options)


@pytest.mark.parametrize("times", [(math.inf,), (math.nan,), (-1.0,), (3.0, 2.0)])
def test_times_must_be_finite_and_rise(times: tuple[float, ...]) -> None:
    with pytest.raises(InvalidInputError, match=rf"the trace has {times[-1]} s after .* times must be finite and rise"):
        simulated([(at, ServeRequest(str(at), None)) for at in times])


def test_a_cancellation_at_the_time_of_an_arrival_comes_after_it() -> None:
    trace = [(0.0, ServeRequest("a", None)), (1.0, ServeRequest("b", None)), (1.0, ServeRequest("c", None))]
    simulation = simulated(trace, cancellations=[(1.0, "b")])
    assert [(each.request_id, each.finished.reason, each.finished_s) for each in simulation.requests] == [
        ("b", FinishReason.CANCELLED, 1.0),
        ("a", FinishReason.DONE, 2.0),
        ("c", FinishReason.DONE, 4.0),
    ]
    assert (simulation["c"].arrival_s, simulation["c"].latency_s, simulation.ended_s) == (1.0, 3.0, 4.0)
    with pytest.raises(StopIteration):
        simulation["nobody"]


def test_a_clock_that_is_given_goes_on_from_its_time() -> None:
    clock = VirtualClock()
    clock.advance_to(5.0)
    simulation = simulated([(6.0, ServeRequest("a", None))], clock=clock)
    assert clock.now() == simulation.ended_s == 8.0
    with pytest.raises(InvalidInputError, match="the trace has 7"):
        simulated([(7.0, ServeRequest("a", None))], clock=clock)


def test_another_listener_hears_of_outputs_and_departures() -> None:
    heard: list[Any] = []

    class Listener:
        def on_output(self, batch: Any, output: Any, now: float) -> None:
            heard.append(("output", batch.size, output, now))

        def on_finished(self, finished: Finished[Any], now: float) -> None:
            heard.append((finished.request_id, finished.result, now))

    simulated([(0.0, ServeRequest("a", None))], listener=Listener())
    assert heard == [("output", 1, [0], 2.0), ("a", 0, 2.0)]


def test_an_empty_trace_ends_where_it_began() -> None:
    simulation = simulated([])
    assert (simulation.requests, simulation.runs, simulation.ended_s) == ((), (), 0.0)


def test_runs_of_several_workers_are_in_order_of_submission() -> None:
    executors = [SimulatedExecutor[Any, Any](lambda _: 2.0, lambda batch: [0] * batch.size) for _ in range(2)]
    trace = [(float(at), ServeRequest(str(at), None)) for at in range(4)]
    simulation = simulate(ZeroBatch[None, int](max_batch_size=1), executors, trace)
    assert [run.number for run in simulation.runs] == [0, 1, 2, 3]
    assert [run.worker for run in simulation.runs] == [0, 1, 0, 1]


def test_wall_clock_does_not_run_backwards() -> None:
    clock = WallClock()
    times_s = [clock.now() for _ in range(100)]
    assert times_s == sorted(times_s)
    assert times_s[-1] < times_s[0] + 60


def test_virtual_clock_moves_only_when_told() -> None:
    clock = VirtualClock(start_s=3.0)
    assert clock.now() == clock.now() == 3.0
    clock.advance_to(3.0)
    clock.advance_to(4.5)
    assert clock.now() == 4.5


@pytest.mark.parametrize("time_s", [2.9, -math.inf, math.nan])
def test_virtual_clock_refuses_to_run_backwards(time_s: float) -> None:
    clock = VirtualClock(start_s=3.0)
    with pytest.raises(InvalidInputError, match="never runs backwards"):
        clock.advance_to(time_s)
    assert clock.now() == 3.0
