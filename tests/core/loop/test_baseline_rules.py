"""The rules of the request-level baselines, one call at a time: limits at their edge, windows, turns and lateness."""

from __future__ import annotations

from typing import Any

import pytest
from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.loop import FinishReason, QueueFullError, ServeRequest, WorkerId
from mlsys_core.loop.baselines import Bucketed, DelayBatch, RequestBatch, StaticBatch, ZeroBatch

WORKER = WorkerId(3)


def request(name: str, **fields: Any) -> ServeRequest[None]:
    return ServeRequest(name, None, **fields)


def ids(batch: RequestBatch[Any] | None) -> str:
    return "" if batch is None else "".join(each.request_id for each in batch.requests)


def add(scheduler: Any, names: str, now: float = 0.0, **fields: Any) -> None:
    for name in names:
        scheduler.add(request(name, **fields), now)


MAKERS: dict[str, Any] = {
    "zero": lambda **limits: ZeroBatch(**limits),
    "delay": lambda **limits: DelayBatch(delay_s=0.0, **limits),
    "static": lambda **limits: StaticBatch(batch_size=limits.pop("max_batch_size"), **limits),
    "bucketed": lambda **limits: Bucketed(**limits),
}
each_policy = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@each_policy
def test_limits_of_one_serve_and_below_are_refused(make: Any) -> None:
    scheduler = make(max_batch_size=1, max_waiting=1)
    add(scheduler, "a")
    with pytest.raises(QueueFullError):
        add(scheduler, "b")
    batch = scheduler.next_batch(WORKER, 0.0)
    assert ids(batch) == "a"
    assert batch.worker == WORKER
    assert scheduler.next_batch(WORKER, 0.0) is None
    with pytest.raises(InvalidInputError, match="takes at least 1 request, got 0"):
        make(max_batch_size=0)
    with pytest.raises(InvalidInputError, match="max_"):
        make(max_batch_size=1, max_waiting=0)


@each_policy
def test_there_is_no_bound_on_what_waits_unless_asked_for(make: Any) -> None:
    scheduler = make(max_batch_size=2)
    for index in range(100):
        scheduler.add(request(str(index)), 0.0)
    assert scheduler.num_unfinished == 100
    assert scheduler.next_batch(WORKER, 0.0).size == 2


@each_policy
def test_an_ended_request_has_a_reason_and_can_come_again(make: Any) -> None:
    scheduler = make(max_batch_size=1)
    add(scheduler, "ab")
    batch = scheduler.next_batch(WORKER, 0.0)
    assert scheduler.num_unfinished == 2
    assert [(each.request_id, each.reason) for each in scheduler.cancel("b", 0.0)] == [("b", FinishReason.CANCELLED)]
    assert list(scheduler.cancel("b", 0.0)) == list(scheduler.cancel("nobody", 0.0)) == []
    error = RuntimeError("lost")
    (left,) = scheduler.fail(batch, error, 1.0)
    assert (left.request_id, left.reason, left.error, left.result) == ("a", FinishReason.FAILED, error, None)
    assert scheduler.num_unfinished == 0
    add(scheduler, "a")
    batch = scheduler.next_batch(WORKER, 1.0)
    (left,) = scheduler.complete(batch, ["done"], 2.0)
    assert (left.reason, left.result, left.error) == (FinishReason.DONE, "done", None)


@each_policy
def test_a_cancelled_request_in_flight_is_cancelled_though_its_batch_fails(make: Any) -> None:
    scheduler = make(max_batch_size=1)
    add(scheduler, "a")
    batch = scheduler.next_batch(WORKER, 0.0)
    assert list(scheduler.cancel("a", 0.0)) == []
    (left,) = scheduler.fail(batch, RuntimeError("lost"), 1.0)
    assert (left.reason, left.error) == (FinishReason.CANCELLED, None)


@each_policy
def test_a_result_on_time_counts_and_a_later_one_does_not(make: Any) -> None:
    for ended_s, reason in ((2.0, FinishReason.DONE), (2.1, FinishReason.EXPIRED)):
        scheduler = make(max_batch_size=1)
        add(scheduler, "a", deadline_s=2.0)
        (left,) = scheduler.complete(scheduler.next_batch(WORKER, 0.0), ["done"], ended_s)
        assert (left.request_id, left.reason) == ("a", reason)
        assert left.result == ("done" if reason is FinishReason.DONE else None)


@each_policy
def test_waiting_ends_at_the_deadline(make: Any) -> None:
    scheduler = make(max_batch_size=1)
    add(scheduler, "ab")
    add(scheduler, "c", deadline_s=5.0)
    scheduler.next_batch(WORKER, 0.0)
    assert scheduler.wake_at(1.0) == 5.0
    assert list(scheduler.expire(4.9)) == []
    assert [(each.request_id, each.reason) for each in scheduler.expire(5.0)] == [("c", FinishReason.EXPIRED)]
    assert scheduler.wake_at(5.0) is None
    assert scheduler.num_unfinished == 2


@each_policy
@pytest.mark.parametrize(
    ("output", "problem"),
    [
        ([], "gave 0 results for a batch of 1 requests"),
        ([1, 2], "gave 2 results for a batch of 1 requests"),
        (None, "not iterable"),
    ],
)
def test_an_output_of_another_length_is_the_executors_fault(make: Any, output: Any, problem: str) -> None:
    scheduler = make(max_batch_size=1)
    add(scheduler, "a")
    (left,) = scheduler.complete(scheduler.next_batch(WORKER, 0.0), output, 0.0)
    assert left.reason is FinishReason.FAILED
    assert isinstance(left.error, ServingError | TypeError)
    assert problem in str(left.error)
    assert scheduler.num_unfinished == 0


def test_a_batch_is_padded_to_its_longest_request() -> None:
    scheduler = ZeroBatch[None, str](max_batch_size=3)
    for name, length in (("a", 4), ("b", 10), ("c", 6), ("d", 99)):
        scheduler.add(request(name, length=length), 0.0)
    batch = scheduler.next_batch(WORKER, 0.0)
    assert batch is not None
    assert (batch.size, batch.padded_length, batch.num_units, batch.num_padded_units) == (3, 10, 20, 30)
    assert batch.padding_waste == pytest.approx(1 / 3)


# DelayBatch: the window.


def test_the_window_is_that_of_the_oldest_and_ends_on_time() -> None:
    scheduler = DelayBatch[None, str](max_batch_size=3, delay_s=2.0)
    assert scheduler.wake_at(0.0) is None
    assert scheduler.next_batch(WORKER, 0.0) is None
    add(scheduler, "a", 1.0)
    add(scheduler, "b", 2.0)
    assert scheduler.wake_at(2.0) == 3.0
    assert scheduler.next_batch(WORKER, 2.9) is None
    assert ids(scheduler.next_batch(WORKER, 3.0)) == "ab"
    assert scheduler.wake_at(3.0) is None


def test_a_full_batch_does_not_wait_and_the_rest_waits_for_its_own_window() -> None:
    scheduler = DelayBatch[None, str](max_batch_size=2, delay_s=2.0)
    add(scheduler, "a", 0.0)
    add(scheduler, "bc", 1.0)
    assert ids(scheduler.next_batch(WORKER, 1.0)) == "ab"
    assert scheduler.next_batch(WORKER, 1.0) is None
    assert scheduler.wake_at(1.0) == 3.0


def test_it_wakes_for_what_comes_first_and_never_for_the_past() -> None:
    scheduler = DelayBatch[None, str](max_batch_size=9, delay_s=2.0)
    add(scheduler, "a", 0.0, deadline_s=1.5)
    add(scheduler, "b", 0.0, deadline_s=7.0)
    assert scheduler.wake_at(0.0) == 1.5
    assert scheduler.wake_at(1.5) == 2.0, "the window: the deadline is now"
    scheduler.expire(1.5)
    assert scheduler.wake_at(2.0) == 7.0, "the window has ended, and a worker that gets free takes what waits"
    assert scheduler.wake_at(8.0) is None


def test_once_draining_nobody_is_waited_for() -> None:
    scheduler = DelayBatch[None, str](max_batch_size=9, delay_s=2.0)
    add(scheduler, "a", 0.0)
    assert scheduler.next_batch(WORKER, 0.5) is None
    scheduler.drain(0.5)
    assert ids(scheduler.next_batch(WORKER, 0.5)) == "a"
    add(scheduler, "b", 0.5)
    assert ids(scheduler.next_batch(WORKER, 0.5)) == "b"


@pytest.mark.parametrize("delay_s", [-0.1, float("inf"), float("nan")])
def test_a_window_that_never_ends_is_refused(delay_s: float) -> None:
    with pytest.raises(InvalidInputError, match=f"delay_s={delay_s}: the window must be"):
        DelayBatch(max_batch_size=1, delay_s=delay_s)


# StaticBatch: one size.


def test_one_size_and_no_other_until_draining() -> None:
    scheduler = StaticBatch[None, str](batch_size=3, max_waiting=3)
    add(scheduler, "ab")
    assert scheduler.next_batch(WORKER, 99.0) is None
    add(scheduler, "c")
    assert ids(scheduler.next_batch(WORKER, 99.0)) == "abc"
    add(scheduler, "def")
    scheduler.cancel("d", 0.0)
    assert scheduler.next_batch(WORKER, 99.0) is None
    scheduler.drain(99.0)
    assert ids(scheduler.next_batch(WORKER, 99.0)) == "ef"
    assert scheduler.next_batch(WORKER, 99.0) is None


def test_a_size_that_never_waits_together_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="no batch would ever fill"):
        StaticBatch(batch_size=4, max_waiting=3)


# Bucketed: lanes of like lengths, in turn.


def test_a_bucket_ends_at_its_width() -> None:
    scheduler = Bucketed[None, str](max_batch_size=9, bucket_width=4)
    lengths = {"a": 1, "b": 4, "c": 5, "d": 8, "e": 9}
    assert [scheduler.bucket_of(request(name, length=length)) for name, length in lengths.items()] == [0, 0, 1, 1, 2]
    by_default = Bucketed[None, str](max_batch_size=9)
    assert [by_default.bucket_of(request("a", length=length)) for length in (10, 11, 20, 21)] == [0, 1, 1, 2]
    one = Bucketed[None, str](max_batch_size=9, bucket_width=1)
    assert [one.bucket_of(request("a", length=length)) for length in (1, 2)] == [0, 1]


def test_buckets_take_turns_and_begin_anew_after_the_last() -> None:
    scheduler = Bucketed[None, str](max_batch_size=1, bucket_width=4)
    for name, length in (("a", 1), ("b", 2), ("c", 9), ("d", 5), ("e", 6)):
        scheduler.add(request(name, length=length), 0.0)
    turns = [scheduler.next_batch(WORKER, 0.0) for _ in range(6)]
    assert [ids(batch) for batch in turns] == ["a", "d", "c", "b", "e", ""]
    assert [batch.padded_length for batch in turns if batch] == [4, 8, 12, 4, 8]


def test_the_longest_that_is_served_is_served() -> None:
    scheduler = Bucketed[None, str](max_batch_size=1, max_length=1)
    scheduler.add(request("a", length=1), 0.0)
    with pytest.raises(InvalidInputError, match="'b' has length 2: at most 1 is served here"):
        scheduler.add(request("b", length=2), 0.0)
    for wrong in ({"bucket_width": 0}, {"max_length": 0}):
        with pytest.raises(InvalidInputError, match="=0: at least 1 is needed"):
            Bucketed(max_batch_size=1, **wrong)
