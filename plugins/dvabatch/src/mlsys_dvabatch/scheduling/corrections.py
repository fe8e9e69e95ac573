"""Correct a profile's costs while serving, by the seconds that batches really take.

A profile measured on a busy machine is wrong by another factor in each entry, and decisions compare entries. Where
batches bear a profile out it stays, scaled if all of it is slower or faster. Else its entries are taken from batches
seen near them, and where none was, from a curve through all: a start, a time for each unit, and attention. The lower
part of what batches take counts, since whatever else the machine does only makes them dearer. Pure: the same batches
lead to the same costs.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mlsys_dvabatch.scheduling.costs import Entry, TableCosts, Vector
from mlsys_dvabatch.scheduling.tasks import StageTask

KEPT = 32  # latest batches of each bucket: half an octave of requests by half an octave of units
LOW = 25  # percentile of what batches take that counts
AGREEING = math.log(1.25)  # buckets that differ from the profile by factors this near each other bear it out
CHANGE = math.log(1.15)  # smaller differences are not worth a new plan
NEAR = 0.5  # octaves around an entry in which batches tell of it
DOUBT = 4  # batches as many as which the curve counts beside those near an entry
PRIOR = 0.02  # weight of an entry of the profile in the curve, beside a bucket's 1
FEWEST = 3  # buckets that make a curve
FIRST_LOOK, RAREST_LOOK = 32, 1024  # batches between two looks at whether costs have changed


@dataclass(slots=True)
class _Seen:
    """Batches of one stage."""

    buckets: dict[tuple[int, int], deque[tuple[int, float, float]]] = field(default_factory=dict)

    def add(self, num: int, length: float, seconds: float) -> None:
        bucket = round(2 * math.log2(num)), round(2 * math.log2(max(1.0, num * length)))
        self.buckets.setdefault(bucket, deque(maxlen=KEPT)).append((num, length, seconds))

    def columns(self) -> tuple[Vector, Vector, Vector, Vector]:
        """Return requests, units of each, seconds, and weights that make buckets equal, by batch."""
        rows = [(*each, 1 / len(bucket)) for bucket in self.buckets.values() for each in bucket]
        num, length, seconds, weight = np.array(rows, np.float64).T
        return num, length, seconds, weight


class Corrections:
    """Costs of a profile, and what batches have told of them.

    Args:
        costs: As measured.
        told: Called with a line of text whenever :meth:`note` gives new costs.

    Example:
        >>> from mlsys_core.profiling import ProfileTable, UnitProfile
        >>> spoiled = TableCosts(ProfileTable((UnitProfile("stage 0 at 1", (1, 2), (0.003, 0.008)),)), 1)
        >>> corrections = Corrections(spoiled)
        >>> for _ in range(40):
        ...     corrections.observe(0, 1, 1, 0.001)
        ...     corrections.observe(0, 2, 1, 0.002)
        >>> corrections.costs().stage_s(0, 2) < 0.0025
        True
    """

    def __init__(self, costs: TableCosts, *, told: Callable[[str], None] = lambda _: None) -> None:
        self.measured = self.published = costs
        self.num_observed = 0  # stages of batches that have been compared
        self._told = told
        self._seen = [_Seen() for _ in range(costs.num_stages)]
        self._next_look, self._between = FIRST_LOOK, FIRST_LOOK

    def note(self, task: StageTask, seconds: Sequence[float]) -> TableCosts | None:
        """Note what each stage of ``task`` took; return new costs where decisions should go by them from now on."""
        if task.skips:
            return None  # some of its requests did not run
        length = self.measured.units_of_each([request.length for request in task.requests], task.padded_length)
        for stage, each in enumerate(seconds, task.stage):
            self.observe(stage, task.num, length, each)
        if self.num_observed < self._next_look:
            return None
        self._between = min(2 * self._between, RAREST_LOOK)
        self._next_look = self.num_observed + self._between
        costs = self.costs()
        changes = [math.log(costs.entry_s(each) / self.published.entry_s(each)) for each in costs.entries()]
        if max(map(abs, changes)) < CHANGE:
            return None
        self.published = costs
        factors = [costs.entry_s(each) / self.measured.entry_s(each) for each in costs.entries()]
        self._told(
            f"costs corrected by {self.num_observed} batches: entries are {min(factors):.2f} to {max(factors):.2f} of "
            "their profile"
        )
        return costs

    def observe(self, stage: int, num: int, length: float, seconds: float) -> None:
        """Note one stage of a batch of ``num`` requests of ``length`` units each; what was not measured is left out."""
        if self.measured.covers(num) and math.isfinite(seconds) and 1e-9 < seconds < 1e6:
            self.num_observed += 1
            self._seen[stage].add(num, length, seconds)

    def costs(self) -> TableCosts:
        """Return the costs by all that was seen; the profile itself, where nothing speaks against it."""
        found: dict[Entry, float] = {}
        for stage, seen in enumerate(self._seen):
            entries = [entry for entry in self.measured.entries() if entry.stage == stage]
            found.update(zip(entries, self._stage(stage, seen, entries), strict=True))
        return self.measured.replaced(found)

    def _stage(self, stage: int, seen: _Seen, entries: list[Entry]) -> list[float]:
        """Return the seconds of all entries of a stage."""
        measured = [self.measured.entry_s(entry) for entry in entries]
        if not seen.buckets:
            return measured
        factors = []
        for bucket in seen.buckets.values():
            ratios = [s / self.measured.stage_s(stage, num, max(1, round(each))) for num, each, s in bucket]
            factors.append(float(np.percentile(np.log(ratios), LOW)))
        low, middle, high = np.percentile(factors, (10, 50, 90))
        scale = math.exp(float(middle))
        if high - low <= AGREEING or len(factors) < FEWEST:
            return measured if abs(middle) < CHANGE else [scale * each for each in measured]
        num, length, seconds, weight = seen.columns()
        curve = self._curve((num, length, seconds, weight), entries, scale * np.array(measured))
        over = np.log(seconds / _along(curve, self.measured.work(num, length)))
        places = np.log2(self.measured.place(num, length))
        return [self._near(entry, curve, over, places) for entry in entries]

    def _curve(self, seen: tuple[Vector, Vector, Vector, Vector], entries: list[Entry], prior: Vector) -> Vector:
        """Return the coefficients, 0 or more, of the curve through what was seen, and weakly through the profile."""
        num, length, seconds, weight = seen
        sizes, lengths = self._shape(entries)
        work = np.concatenate([self.measured.work(num, length), self.measured.work(sizes, lengths)], axis=1)
        goal = np.concatenate([seconds, prior])
        weights = np.concatenate([weight, np.full(len(prior), PRIOR)])
        sides = np.ones_like(goal)
        best = np.zeros(len(work))
        for _ in range(8):  # batches above the curve count less: it goes through the lower ones
            best = _least_squares(work / goal, np.sqrt(weights * sides))
            sides = np.where(_along(best, work) < goal, LOW / (100 - LOW), 1.0)
        return best

    def _shape(self, entries: list[Entry]) -> tuple[Vector, Vector]:
        """Return the requests and units of each of the batches that the entries are of."""
        sizes = np.array([entry.size for entry in entries], np.float64)
        return sizes, np.array([self.measured.units_of_entry(entry) for entry in entries], np.float64)

    def _near(self, entry: Entry, curve: Vector, over: Vector, places: Vector) -> float:
        """Return an entry's seconds: the curve's, corrected by the batches near it."""
        sizes, lengths = self._shape([entry])
        here = np.log2(self.measured.place(sizes, lengths))
        near = over[(np.abs(places - here) <= NEAR).all(axis=0)]
        shift = float(np.percentile(near, LOW)) * len(near) / (len(near) + DOUBT) if len(near) else 0.0
        return float(_along(curve, self.measured.work(sizes, lengths))[0]) * math.exp(shift)


def _along(curve: Vector, work: Vector) -> Vector:
    """Return the curve's seconds, [batches], for work [coefficients, batches]."""
    return np.maximum(curve @ work, 1e-9)


def _least_squares(work: Vector, weights: Vector) -> Vector:
    """Return the coefficients, 0 or more, with which ``work`` [coefficients, batches] comes nearest to 1."""
    best, least = np.zeros(len(work)), math.inf
    for num in range(1, len(work) + 1):
        for chosen in map(list, itertools.combinations(range(len(work)), num)):
            solution, *_ = np.linalg.lstsq((work[chosen] * weights).T, weights, rcond=None)
            error = float(np.sum(((solution @ work[chosen] - 1) * weights) ** 2))
            if (solution >= 0).all() and error < least:
                least, best = error, np.zeros(len(work))
                best[chosen] = solution
    return best
