"""Timelines of the request-level baselines, worked out by hand."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import (
    FinishReason,
    QueueFullError,
    ServeRequest,
    SimulatedExecutor,
    Simulation,
    WorkerId,
    simulate,
)
from mlsys_core.loop.baselines import Bucketed, DelayBatch, RequestBatch, StaticBatch, ZeroBatch

Batch = RequestBatch[None]


def request(name: str, **fields: Any) -> ServeRequest[None]:
    return ServeRequest(name, None, **fields)


def worker(cost: Callable[[Batch], float], **options: Any) -> SimulatedExecutor[Batch, list[str]]:
    return SimulatedExecutor(cost, lambda batch: [each.request_id for each in batch.requests], **options)


def three_plus_size(batch: Batch) -> float:
    return 3.0 + batch.size


def serve(scheduler: Any, workers: Any, trace: Any) -> Simulation[Batch]:
    return simulate(scheduler, workers, trace)


def runs(simulation: Simulation[Batch]) -> list[tuple[str, int, float, float]]:
    """(requests, worker, start, end) of every batch."""
    return [
        ("".join(each.request_id for each in run.batch.requests), run.worker, run.started_s, run.ended_s)
        for run in simulation.runs
    ]


def latencies(simulation: Simulation[Batch]) -> dict[str, float]:
    return {served.request_id: served.latency_s for served in simulation.requests}


FIVE: Iterable[tuple[float, ServeRequest[None]]] = [
    (at, request(name)) for name, at in [("a", 0), ("b", 1), ("c", 2), ("d", 5), ("e", 9)]
]


def test_zero_batch_takes_what_is_there() -> None:
    simulation = serve(ZeroBatch(max_batch_size=4), worker(three_plus_size), FIVE)
    # e comes at the moment the second batch ends, and is in the third.
    assert runs(simulation) == [("a", 0, 0, 4), ("bc", 0, 4, 9), ("de", 0, 9, 14)]
    assert latencies(simulation) == {"a": 4, "b": 8, "c": 7, "d": 9, "e": 5}
    assert simulation["c"].finished.result == "c"


def test_delay_batch_waits_for_the_window_of_the_oldest() -> None:
    simulation = serve(DelayBatch(max_batch_size=4, delay_s=3), worker(three_plus_size), FIVE)
    # d's window ends at 8, while the worker is busy: at 9 nobody waits any longer.
    assert runs(simulation) == [("abc", 0, 3, 9), ("de", 0, 9, 14)]
    assert latencies(simulation) == {"a": 9, "b": 8, "c": 7, "d": 9, "e": 5}


def test_delay_batch_of_zero_is_zero_batch() -> None:
    delay = serve(DelayBatch(max_batch_size=4, delay_s=0), worker(three_plus_size), FIVE)
    assert runs(delay) == runs(serve(ZeroBatch(max_batch_size=4), worker(three_plus_size), FIVE))


def test_static_batch_waits_until_full_and_flushes_when_drained() -> None:
    simulation = serve(StaticBatch(batch_size=2), worker(three_plus_size), FIVE)
    # Nothing moves after 11, so the simulation drains and e runs alone.
    assert runs(simulation) == [("ab", 0, 1, 6), ("cd", 0, 6, 11), ("e", 0, 11, 15)]


def test_bucketed_goes_round_and_pads_to_the_upper_bound() -> None:
    lengths = {"a": 5, "b": 21, "c": 10, "d": 29, "e": 11}
    trace = [(0.0, request(name, length=length)) for name, length in lengths.items()]
    simulation = serve(Bucketed(max_batch_size=8), worker(lambda batch: float(batch.padded_length)), trace)
    assert runs(simulation) == [("ac", 0, 0, 10), ("e", 0, 10, 30), ("bd", 0, 30, 60)]
    assert [run.batch.padded_length for run in simulation.runs] == [10, 20, 30]
    assert [round(run.batch.padding_waste, 3) for run in simulation.runs] == [0.25, 0.45, 0.167]


def test_idle_workers_share_what_comes() -> None:
    trace = [(0, request("a")), (0, request("b")), (0, request("c")), (1, request("d")), (1.5, request("e"))]
    simulation = serve(ZeroBatch(max_batch_size=2), [worker(lambda _: 2.0), worker(lambda _: 2.0)], trace)
    assert runs(simulation) == [("ab", 0, 0, 2), ("c", 1, 0, 2), ("de", 0, 2, 4)]


def test_an_idle_worker_goes_before_one_with_room_for_a_second_batch() -> None:
    trace = [(0, request("a")), (1, request("b")), (1, request("c")), (1, request("d"))]
    workers = [worker(lambda _: 4.0, max_in_flight=2) for _ in range(2)]
    simulation = serve(ZeroBatch(max_batch_size=1), workers, trace)
    # At 1, b goes to the idle worker; then both have one, and c and d queue behind a and b.
    assert runs(simulation) == [("a", 0, 0, 4), ("b", 1, 1, 5), ("c", 0, 4, 8), ("d", 1, 5, 9)]


def test_priority_goes_first_within_what_waits() -> None:
    trace = [(0, request("a")), (1, request("b")), (1, request("c", priority=-1))]
    simulation = serve(ZeroBatch(max_batch_size=1), worker(lambda _: 2.0), trace)
    assert [name for name, *_ in runs(simulation)] == ["a", "c", "b"]


@pytest.mark.parametrize(
    "scheduler",
    [
        ZeroBatch[None, str](max_batch_size=1),
        DelayBatch[None, str](max_batch_size=1, delay_s=5),
        StaticBatch[None, str](batch_size=1),
        Bucketed[None, str](max_batch_size=1),
    ],
    ids=lambda scheduler: type(scheduler).__name__,
)
def test_deadlines_end_waiting_at_once_and_running_late(scheduler: Any) -> None:
    trace = [
        (0, request("runs late", deadline_s=3.9)),
        (0, request("waits", deadline_s=2.5)),
        (0, request("just in time", deadline_s=8.0)),
    ]
    simulation = serve(scheduler, worker(lambda _: 4.0), trace)
    assert [(each.request_id, each.finished.reason, each.finished_s) for each in simulation.requests] == [
        ("waits", FinishReason.EXPIRED, 2.5),  # found at its deadline, though no batch ended then
        ("runs late", FinishReason.EXPIRED, 4.0),
        ("just in time", FinishReason.DONE, 8.0),
    ]
    assert scheduler.num_unfinished == 0


def test_a_deadline_at_zero_wakes_too() -> None:
    scheduler = DelayBatch[None, str](max_batch_size=2, delay_s=100)
    scheduler.add(request("a", deadline_s=0.0), now=-1.0)
    assert scheduler.wake_at(-1.0) == 0.0


def test_results_are_taken_one_by_one() -> None:
    scheduler = ZeroBatch[None, int](max_batch_size=3)
    for name in "abc":
        scheduler.add(request(name), 0.0)
    batch = scheduler.next_batch(WorkerId(0), 0.0)
    assert batch is not None
    assert list(scheduler.cancel("c", 0.5)) == []  # in flight: it leaves with its batch
    problem = ValueError("only b is bad")
    finished = scheduler.complete(batch, [1, problem, 3], 1.0)
    assert [(each.request_id, each.reason, each.result, each.error) for each in finished] == [
        ("a", FinishReason.DONE, 1, None),
        ("b", FinishReason.FAILED, None, problem),
        ("c", FinishReason.CANCELLED, None, None),
    ]


def test_refusals_keep_nothing() -> None:
    scheduler = Bucketed[None, int](max_batch_size=2, max_length=100, max_waiting=1)
    with pytest.raises(InvalidInputError, match="length 101: at most 100"):
        scheduler.add(request("long", length=101), 0.0)
    scheduler.add(request("a"), 0.0)
    with pytest.raises(QueueFullError):
        scheduler.add(request("b"), 0.0)
    assert scheduler.num_unfinished == 1
    scheduler.next_batch(WorkerId(0), 0.0)
    with pytest.raises(InvalidInputError, match="'a' is in flight"):
        scheduler.add(request("a"), 0.0)
    assert scheduler.num_unfinished == 1
