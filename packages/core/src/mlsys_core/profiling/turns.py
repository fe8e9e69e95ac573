"""Timing of several calls in turns, so that whatever else the machine does falls on all of them alike.

A *turn* is: idle, so that the threads of the call before stop spinning; one call that is not timed; then timed calls
for a while. A *round* is one turn of each call; every second round runs in reverse order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import TypeVar

T = TypeVar("T")

IDLE_S = 0.02  # OpenMP's threads spin for some milliseconds after a parallel region
FEWEST_CALLS, MOST_CALLS = 3, 500  # in a turn


def rounds(
    items: Sequence[T],
    *,
    num_rounds: int = 2,
    budget_s: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Sequence[T]]:
    """Yield the items once a round, every second time in reverse, so that none always follows the same other one.

    Args:
        items: Cases, by any name.
        num_rounds: Rounds at least.
        budget_s: Begin further rounds until so many seconds have passed.
        clock: Seconds, monotonic.

    Example:
        >>> list(rounds("ab"))
        ['ab', 'ba']
    """
    started = clock()
    for number in count():
        if number >= num_rounds and clock() - started >= budget_s:
            return
        yield items[:: 1 if number % 2 == 0 else -1]


def take_turns(
    calls: Mapping[str, Callable[[], object]],
    *,
    turn_s: float,
    num_rounds: int = 2,
    budget_s: float = 0.0,
    before: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, list[list[float]]]:
    """Time each call in turns; return by name, for each turn, the seconds of each timed call.

    Args:
        calls: What to time, by name.
        turn_s: Seconds of timed calls in a turn.
        num_rounds: Turns of each call at least.
        budget_s: Begin further rounds until so many seconds have passed.
        before: Called before each timed call, which it is no part of.
        clock: Seconds, monotonic.
        sleep: Waits for so many seconds.
    """
    turns: dict[str, list[list[float]]] = {name: [] for name in calls}
    for names in rounds(list(calls), num_rounds=num_rounds, budget_s=budget_s, clock=clock):
        for name in names:
            call, samples = calls[name], list[float]()
            sleep(IDLE_S)
            call()
            first = clock()
            while len(samples) < MOST_CALLS:
                if before is not None:
                    before()
                begin = clock()
                call()
                end = clock()
                samples.append(end - begin)
                if len(samples) >= FEWEST_CALLS and end - first >= turn_s:
                    break
            turns[name].append(samples)
    return turns
