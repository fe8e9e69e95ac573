"""Timing contestants in turns, so that what else the machine does falls on all of them alike.

Each contestant first answers the same rows as the source; only those whose answers agree are timed. A *turn* is one
call that is not timed, so that caches and waiting threads are the contestant's own, and then some that are.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Clock = Callable[[], float]
Status = Literal["timed", "differs", "does not run", "not installed", "does not apply"]

_MOST_CALLS_PER_TURN = 500


class DoesNotApply(Exception):  # noqa: N818 - it is no error: the contestant sits this workload out
    """The contestant is not meant for such a model; the message says why."""


@dataclass(frozen=True, slots=True)
class Runner:
    """A contestant made ready for one model."""

    prepare: Callable[[Any], Any]  # raw rows to the form that it takes; not timed
    answer: Callable[[Any], Any]  # what is timed
    finish: Callable[[Any], Any] = lambda result: result  # to probabilities, for the comparison; not timed
    note: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one contestant on one model."""

    status: Status
    note: str = ""
    difference: float | None = None  # the largest, from the source's probabilities
    samples_s: Mapping[int, tuple[float, ...]] | None = None  # by batch size: seconds a call, one for each round

    def median_s(self, batch: int) -> float | None:
        """Return the median seconds a call; None if it was not timed."""
        return None if self.samples_s is None else statistics.median(self.samples_s[batch])


def race(
    builders: Mapping[str, Callable[[], Runner]],
    table: Any,
    expected: npt.NDArray[np.float64],
    *,
    batches: tuple[int, ...],
    rounds: int,
    turn_s: float,
    tolerance: float,
    clock: Clock = time.perf_counter,
) -> dict[str, Outcome]:
    """Build, compare, then time in turns.

    Args:
        builders: Each makes a contestant ready; what it raises becomes the outcome.
        table: Raw rows, as many as the largest batch or more; the first of them make each batch.
        expected: The source's probability of the last class for each row of ``table``.
        batches: Rows a call.
        rounds: Turns of each contestant with each batch.
        turn_s: About how long a turn may last, in seconds; a turn has one timed call at least.
        tolerance: The largest absolute difference from ``expected`` with which a contestant is still timed.
        clock: Seconds, monotonic.
    """
    outcomes: dict[str, Outcome] = {}
    runners: dict[str, Runner] = {}
    inputs: dict[tuple[str, int], Any] = {}
    for name, build in builders.items():
        outcome, runner = _admit(build, table, expected, tolerance)
        outcomes[name] = outcome
        if runner is not None:
            runners[name] = runner
            inputs |= {(name, batch): runner.prepare(table[:batch]) for batch in batches}
    samples: dict[tuple[str, int], list[float]] = {key: [] for key in inputs}
    calls = {key: _calls(runners[key[0]].answer, x, turn_s, clock) for key, x in inputs.items()}
    for number in range(rounds):
        keys = list(inputs)
        for key in keys if number % 2 == 0 else reversed(keys):  # so that nobody always follows the same one
            samples[key].append(_turn(runners[key[0]].answer, inputs[key], calls[key], clock))
    for name in runners:
        own = {batch: tuple(samples[name, batch]) for batch in batches}
        outcomes[name] = Outcome("timed", outcomes[name].note, outcomes[name].difference, own)
    return outcomes


def _admit(
    build: Callable[[], Runner], table: Any, expected: npt.NDArray[np.float64], tolerance: float
) -> tuple[Outcome, Runner | None]:
    """Build a contestant and check its answers; return its outcome so far, and the runner if it is to be timed."""
    try:
        runner = build()
        got = np.asarray(runner.finish(runner.answer(runner.prepare(table))), np.float64)
    except DoesNotApply as reason:
        return Outcome("does not apply", str(reason)), None
    except ModuleNotFoundError as error:
        return Outcome("not installed", f"no package {error.name}"), None
    except Exception as error:  # noqa: BLE001 - a peer may fail in any way; it is reported
        return Outcome("does not run", _one_line(error)), None
    got = got.reshape(len(expected), -1)[:, -1]
    difference = float(np.abs(got - expected).max())
    if not difference <= tolerance:
        rows = int((~(np.abs(got - expected) <= tolerance)).sum())
        note = f"{rows} of {len(expected)} rows differ by more than {tolerance:g}"
        return Outcome("differs", note, difference if np.isfinite(difference) else None), None
    return Outcome("timed", runner.note, difference), runner


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120] + ' ...' + text[-80:] if len(text) > 220 else text}"


def _calls(answer: Callable[[Any], Any], x: Any, turn_s: float, clock: Clock) -> int:
    """Return the number of calls that fill a turn."""
    duration = min(_turn(answer, x, 1, clock) for _ in range(2))
    return int(np.clip(turn_s / max(duration, 1e-9), 1, _MOST_CALLS_PER_TURN))


def _turn(answer: Callable[[Any], Any], x: Any, calls: int, clock: Clock) -> float:
    """Return the seconds a call takes in a turn of ``calls``, after one that is not timed."""
    answer(x)
    start = clock()
    for _ in range(calls):
        answer(x)
    return (clock() - start) / calls
