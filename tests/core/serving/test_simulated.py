"""Virtual time: pipelines, determinism, and what a simulation refuses. Timelines are worked out by hand."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.profiling.recorder import Recorder
from mlsys_core.serving import (
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
from mlsys_core.serving.baselines import RequestBatch, ZeroBatch


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
    assert [served.request_id for served in simulation.with_reason(FinishReason.DONE)] == ["a", "c"]
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


def test_what_cannot_be_simulated_is_said() -> None:
    executor = SimulatedExecutor[Any, Any](one, lambda _: None)
    with pytest.raises(ServingError, match=r"stuck at 2\.0 s: the scheduler keeps 1 requests"):
        simulate(Hoarder(1), executor, [(2.0, ("a", 1))], request_id=lambda request: request[0])
    with pytest.raises(InvalidInputError, match="the trace has 1 s after 2 s"):
        simulate(
            ZeroBatch[None, int](max_batch_size=1),
            executor,
            [(2, ServeRequest("a", None)), (1, ServeRequest("b", None))],
        )
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
