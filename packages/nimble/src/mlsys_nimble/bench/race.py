"""Contestants in turns: answers compared first, then times, so that what else the machine does falls on all alike.

Pure but for the clock and the sleep, which are handed over. A *turn* is: idle, so that the threads of whoever had the
turn before stop spinning; one call that is not timed; then timed calls for a while.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["timed", "differs", "does not run", "not installed", "left out"]
# Of the largest difference from what the net gives in float64, over the largest value; more where eager is as far off.
TOLERANCE, EAGER_TIMES = 1e-4, 3.0

IDLE_S = 0.02  # OpenMP's threads spin for some milliseconds after a parallel region
_FEWEST_CALLS, _MOST_CALLS = 3, 500  # in a turn


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one contestant on one net."""

    status: Status
    note: str = ""
    difference: float | None = None  # relative, from the results in float64
    prepare_s: float | None = None  # until it could first be called
    samples_s: tuple[float, ...] = field(default=(), repr=False)  # a call each

    @property
    def median_s(self) -> float | None:
        """Seconds a call; None if it was not timed."""
        return statistics.median(self.samples_s) if self.samples_s else None


def take_turns(
    calls: Mapping[str, Callable[[], object]],
    *,
    budget_s: float,
    turn_s: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    idle_s: float = IDLE_S,
) -> dict[str, list[float]]:
    """Seconds of each timed call, by contestant.

    Args:
        calls: Each contestant's call.
        budget_s: No round begins after so many seconds; there are two rounds at least.
        turn_s: Seconds of timed calls in a turn; at least three calls.
        clock: Seconds, monotonic.
        sleep: Lets seconds pass.
        idle_s: Before each turn.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    started = clock()
    number = 0
    while number < 2 or clock() - started < budget_s:
        names = list(calls)[:: 1 if number % 2 == 0 else -1]  # nobody always follows the same one
        for name in names:
            call = calls[name]
            sleep(idle_s)
            call()
            first = clock()
            for count in range(1, _MOST_CALLS + 1):
                before = clock()
                call()
                after = clock()
                samples[name].append(after - before)
                if count >= _FEWEST_CALLS and after - first >= turn_s:
                    break
        number += 1
    return samples
