"""A race: make each case ready, compare its results, then time those that are right, in turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mlsys_core.profiling.turns import take_turns

Status = Literal["timed", "differs", "does not run", "not installed", "left out"]


class LeftOut(Exception):  # noqa: N818 - it is no error: the case does not apply here
    """A case that does not apply here; the message says why."""


@dataclass(frozen=True, slots=True)
class Case:
    """A benchmark case made ready to be timed."""

    call: Callable[[], Any]  # what is timed
    result: Callable[[Any], Any] = lambda returned: returned  # of what ``call`` returns, for the comparison; not timed
    note: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one case."""

    status: Status
    note: str = ""
    difference: float | None = None  # from the expected result, in the race's own measure
    prepare_s: float | None = None  # seconds until its first result
    turns_s: tuple[tuple[float, ...], ...] = field(default=(), repr=False)  # seconds of each call, turn by turn

    @property
    def samples_s(self) -> list[float]:
        """Seconds of all timed calls."""
        return [sample for turn in self.turns_s for sample in turn]

    @property
    def median_s(self) -> float | None:
        """Median seconds of a call; None if it was not timed."""
        return statistics.median(self.samples_s) if self.turns_s else None

    @property
    def least_s(self) -> float | None:
        """Least seconds of a call; None if it was not timed."""
        return min(self.samples_s) if self.turns_s else None

    def to_json(self) -> dict[str, object]:
        """Return the figures as JSON values, the single calls left out."""
        figures = {key: value for key, value in asdict(self).items() if key != "turns_s"}
        samples = self.samples_s
        figures["calls"] = len(samples)
        if len(samples) > 1:
            tenths = statistics.quantiles(samples, n=10)
            figures |= {"median_s": self.median_s, "least_s": self.least_s, "p10_s": tenths[0], "p90_s": tenths[-1]}
        return figures


Outcomes = Mapping[str, Outcome]  # by case


def speed_up(case: Outcome | None, over: Outcome | None) -> float | None:
    """Return how many times faster a case is than another: the median of the ratios within rounds.

    None if one of them was not timed. What slows the machine for a while falls on both sides of a round's ratio.
    """
    if case is None or over is None or not case.turns_s or not over.turns_s:
        return None
    pairs = zip(over.turns_s, case.turns_s, strict=True)
    return statistics.median(statistics.median(theirs) / statistics.median(ours) for theirs, ours in pairs)


def fastest(outcomes: Outcomes, names: Mapping[str, Any] | tuple[str, ...]) -> str | None:
    """Return the name of the fastest case among ``names``; None if none of them was timed."""
    medians = {name: outcomes[name].median_s for name in names if name in outcomes}
    timed = {name: median_s for name, median_s in medians.items() if median_s is not None}
    return min(timed, key=timed.__getitem__, default=None)


def admit(
    makers: Mapping[str, Callable[[], Case]],
    *,
    difference: Callable[[Any, Any], float],
    expected: Any = None,
    tolerance: float,
    slack: float = 0.0,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Outcome], dict[str, Case]]:
    """Make each case ready and compare its result; return all outcomes so far, and the cases to be timed.

    Args:
        makers: Each makes a case ready; whatever it raises becomes its outcome.
        difference: Measures how far a result is from the expected one; not a number counts as infinitely far.
        expected: The right result; None: the first case's.
        tolerance: The largest difference with which a case is timed.
        slack: Allow so many times the first case's own difference as well.
        say: Told the name of each case before it is made ready.
    """
    outcomes: dict[str, Outcome] = {}
    ready: dict[str, Case] = {}
    for number, (name, make) in enumerate(makers.items()):
        say(name)
        started = time.perf_counter()
        try:
            case = make()
            result = case.result(case.call())
            prepare_s = time.perf_counter() - started
            expected = result if expected is None else expected
            found = difference(result, expected)
        except Exception as error:  # noqa: BLE001 - a case may fail in any way; it is reported
            outcomes[name] = _failure(error)
            continue
        if number == 0:
            tolerance = max(tolerance, slack * found)
        if found <= tolerance:
            outcomes[name], ready[name] = Outcome("timed", case.note, found, prepare_s), case
        else:
            finite = found if math.isfinite(found) else None  # infinity is no JSON value
            outcomes[name] = Outcome("differs", f"by {found:.1e}, allowed {tolerance:.1e}", finite, prepare_s)
    return outcomes, ready


def race(
    makers: Mapping[str, Callable[[], Case]],
    *,
    difference: Callable[[Any, Any], float],
    expected: Any = None,
    tolerance: float,
    slack: float = 0.0,
    turn_s: float,
    num_rounds: int = 2,
    budget_s: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Outcome]:
    """Make the cases ready, compare, and time those that are right; see :func:`admit` and :func:`take_turns`."""
    outcomes, ready = admit(makers, difference=difference, expected=expected, tolerance=tolerance, slack=slack, say=say)
    say(f"{len(ready)} cases in turns")
    calls = {name: case.call for name, case in ready.items()}
    turns = take_turns(calls, turn_s=turn_s, num_rounds=num_rounds, budget_s=budget_s, clock=clock)
    return outcomes | {name: timed(outcomes[name], own) for name, own in turns.items()}


def timed(outcome: Outcome, turns: list[list[float]]) -> Outcome:
    """Return the outcome of an admitted case with its turns."""
    turns_s = tuple(map(tuple, turns))
    return Outcome("timed", outcome.note, outcome.difference, outcome.prepare_s, turns_s)


def _failure(error: Exception) -> Outcome:
    if isinstance(error, LeftOut):
        return Outcome("left out", str(error))
    if isinstance(error, ModuleNotFoundError):
        return Outcome("not installed", f"no package {error.name}")
    text = " ".join(str(error).split()).replace(str(Path.home()), "~")
    text = f"{text[:120]} ... {text[-80:]}" if len(text) > 220 else text
    return Outcome("does not run", f"{type(error).__name__}: {text}")
