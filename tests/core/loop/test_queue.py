import math
from typing import Any

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import QueueFullError, RequestQueue, ServeRequest


def request(name: str, **fields: Any) -> ServeRequest[None]:
    return ServeRequest(name, None, **fields)


def pop_all(queue: RequestQueue[None], now: float, *, lane: int = 0) -> list[str]:
    names = []
    while (popped := queue.pop(now, lane=lane)) is not None:
        names.append(popped.request_id)
    return names


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"request_id": ""}, "not empty"),
        ({"length": 0}, "length 0"),
        ({"arrival_s": math.nan}, "arrival_s=nan"),
        ({"deadline_s": math.inf}, "deadline_s=inf"),
    ],
)
def test_requests_are_checked_before_they_get_anywhere(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        ServeRequest(**{"request_id": "a", "payload": None, **fields})


def test_a_queue_needs_room_for_one() -> None:
    with pytest.raises(InvalidInputError, match="max_size=0"):
        RequestQueue[None](max_size=0)


def test_waiting_requests_are_seen_in_order_of_admission():
    queue = RequestQueue[None]()
    for at, (name, priority) in enumerate((("a", 0), ("b", -1), ("c", 0))):
        queue.push(ServeRequest(name, None, priority=priority), now=float(at))
    queue.cancel("a")
    assert [(request.request_id, since_s) for request, since_s in queue.waiting()] == [("b", 1.0), ("c", 2.0)]
    assert len(queue) == 2


def refusal_of(queue: RequestQueue[None], now: float) -> QueueFullError:
    with pytest.raises(QueueFullError) as refused:
        queue.push(request("one more"), now)
    return refused.value


def test_the_estimate_is_the_default_until_two_have_left_and_time_has_passed() -> None:
    queue = RequestQueue[None](max_size=2)
    for name in "ab":
        queue.push(request(name), now=0.0)
    assert refusal_of(queue, 1.0).retry_after_s == queue.retry_after_s(1.0) == 1.0
    queue.pop(1.0)
    queue.push(request("c"), now=1.0)
    assert queue.retry_after_s(9.0) == 1.0, "one departure is no rate"
    queue.pop(1.0)
    queue.push(request("d"), now=1.0)
    assert queue.retry_after_s(1.0) == 1.0, "two at once, and no time since"
    assert queue.retry_after_s(2.0) == 1.0, "two wait, two left within a second"
    assert queue.retry_after_s(5.0) == 4.0
    assert queue.retry_after_s(61.0) == 60.0, "at one in 30 s, two take 60"
    assert queue.retry_after_s(500.0) == 60.0


def test_the_rate_counts_from_the_first_departure_to_now() -> None:
    queue = RequestQueue[None]()
    for name in "abcde":
        queue.push(request(name), now=0.0)
    queue.pop(1.0)
    queue.pop(3.0)
    assert queue.retry_after_s(3.0) == 3.0, "three wait, and two left in two seconds"


def test_the_rate_is_that_of_the_last_64_departures() -> None:
    queue = RequestQueue[None]()
    for index in range(100):  # slow at first, ten a second then
        queue.push(request(str(index)), now=0.0)
    for index in range(36):
        queue.pop(10.0 * index)
    for index in range(64):
        queue.pop(1000.0 + 0.1 * index)
    for index in range(32):
        queue.push(request(f"waits {index}"), now=1006.4)
    assert queue.retry_after_s(1006.4) == pytest.approx(32 / 10)


def test_a_refusal_says_how_many_wait_and_when_to_come_back() -> None:
    queue = RequestQueue[None](max_size=1)
    queue.push(request("a"), now=0.0)
    refused = refusal_of(queue, 0.0)
    assert str(refused) == ("request 'one more' refused: 1 requests wait, which is the most allowed; try again in 1 s")
    assert refused.retry_after_s == 1.0
    assert len(queue) == 1


@pytest.mark.parametrize("num_waiting", [0, 5])
def test_heaps_hold_at_most_twice_what_waits_and_64_more(num_waiting: int) -> None:
    """The bound that the class states, at its edge: stale entries are swept out just above it."""
    queue = RequestQueue[None]()
    queue.push(request("stays"), now=0.0)
    for index in range(num_waiting):
        queue.push(request(f"waits {index}", deadline_s=1e9), now=0.0)
    sizes = []
    for index in range(150):
        queue.push(request(str(index), deadline_s=1e8), now=0.0)
        queue.cancel(str(index))
        sizes.append((len(queue._orders[0]), len(queue._deadlines)))
    bound = 2 * (1 + num_waiting) + 64
    assert (max(size for size, _ in sizes), max(size for _, size in sizes)) == (bound, bound)
    assert next(each.request_id for each, _ in queue.waiting()) == "stays"
    assert len(pop_all(queue, 1.0)) == 1 + num_waiting


def test_a_lane_that_empties_forgets_its_stale_entries() -> None:
    queue = RequestQueue[None](lane_of=lambda each: each.length)
    for name, length in (("a", 1), ("b", 2), ("c", 1)):
        queue.push(request(name, length=length), now=0.0)
    queue.cancel("a")
    assert set(queue.lanes) == {1, 2}
    queue.cancel("c")
    assert set(queue.lanes) == set(queue._orders) == {2}
    queue.push(request("a", length=1, priority=5), now=1.0)
    assert pop_all(queue, 1.0, lane=1) == ["a"]
    assert queue.pop(1.0) is None, "nothing waits in lane 0"


def test_an_id_that_waits_again_is_served_by_its_new_place_and_deadline() -> None:
    queue = RequestQueue[None]()
    queue.push(request("a", priority=-1, deadline_s=1.0), now=0.0)
    queue.push(request("b"), now=0.0)
    queue.cancel("a")
    assert queue.next_deadline_s() is None
    queue.push(request("a", priority=1, deadline_s=3.0), now=0.5)
    assert queue.next_deadline_s() == 3.0
    assert "a" in queue
    assert pop_all(queue, 2.0) == ["b", "a"]
    assert "a" not in queue
    assert queue.next_deadline_s() is None


def test_a_deadline_comes_at_its_time_and_not_before() -> None:
    queue = RequestQueue[None]()
    queue.push(request("a", deadline_s=2.0), now=0.0)
    assert queue.expire(1.9) == []
    popped = queue.pop(1.9)
    assert popped is not None
    queue.push(request("a", deadline_s=2.0), now=1.9)
    assert queue.pop(2.0) is None
    queue.push(request("b", deadline_s=2.0), now=2.0)  # is too late already
    assert [each.request_id for each in queue.expire(2.0)] == ["a", "b"]
    assert len(queue) == 0
