"""The best next step by measured costs: how many to begin with, who joins, where to split, when to ask again. Pure.

A server that takes batches from a queue under Poisson arrivals is a semi-Markov decision process. Policy iteration
(Howard) on the costs of whole batches gives the average waiting ``g`` of the best batch sizes, and the value ``V(q)``
of ``q`` requests waiting: the seconds of waiting, summed over all requests to come, by which that state is worse than
an empty one. A choice in mid-course - go on, let some join, split - is then worth the waiting of those it is about, and
``V`` of what will be waiting when it is over. Taking the best of them is one step of policy improvement over whole
batches, so by these costs it is never worse than the best sizes of whole batches.
"""

from __future__ import annotations

from functools import lru_cache
from math import lgamma

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from mlsys_dvabatch.scheduling.costs import StageCosts, catch_up_s, least_request_s, remaining_s
from mlsys_dvabatch.scheduling.policies.decisions import HYSTERESIS, planned_split, sizes_by_cost

TASK_S = 100e-6  # seconds that the loop and its threads add to a task, docs/serving-loop.md
LONGEST_RUN_S = 0.02  # a run of stages that nobody is asked in between: cancelled requests leave after it
_PRICES = (0, 8, 32, 128, 1024)  # numbers of requests behind a batch, for which its splits are planned
_NUM_STATES = 193  # numbers of waiting requests that are distinguished, 0 included
_LOG_FACTORIALS = np.array([lgamma(number + 1) for number in range(_NUM_STATES)])

Vector = NDArray[np.float64]


class Planner:
    """Optimal decisions at one load, by policy iteration.

    Args:
        costs: seconds of each stage; one batch at a time.
        max_batch_size: most requests in a batch.
        rate: requests per second that come.
        length: units to which each is padded.

    Example:
        >>> from mlsys_dvabatch.stages.simulated import parse_stages
        >>> planner = Planner(parse_stages("4+0.1,4+0.1"), max_batch_size=16, rate=100)
        >>> planner.begin(5), planner.join(stages_done=1, earlier=1, waiting=4)
        (5, 4)
    """

    def __init__(self, costs: StageCosts, max_batch_size: int, rate: float, length: int = 1) -> None:
        self.costs = costs
        self.max_batch_size = max_batch_size
        self.rate = rate
        self.length = length
        small = range(1, min(64, max_batch_size) + 1)  # each: where some are left out, values fall as queues grow
        self._sizes = sorted({*small, *range(72, max_batch_size + 1, 8), max_batch_size})
        self._ways = [
            (size, waiting_s, work_s)
            for size in self._sizes
            for waiting_s, work_s in {self._rest(0, size, price) for price in _PRICES}
        ]
        self._values, self._gain, self._best = self._solve()
        self._going_on = lru_cache(maxsize=1 << 14)(self._worth_of_going_on)
        self.begin = lru_cache(maxsize=1 << 10)(self._begin)
        self.join = lru_cache(maxsize=1 << 16)(self._join)
        self.split = lru_cache(maxsize=1 << 14)(self._split)
        self.run_to = lru_cache(maxsize=1 << 14)(self._run_to)

    @property
    def mean_s(self) -> float:
        """Average latency with the best sizes of whole batches."""
        return self._gain / self.rate

    def _begin(self, waiting: int) -> int:
        """Return the optimal number of requests to start together, of ``waiting``."""
        waiting = _capped(waiting)
        size = self._ways[self._best[waiting]][0]
        following = next((other for other in self._sizes if other > size), self.max_batch_size + 1)
        return min(waiting, self.max_batch_size) if waiting < following else size

    def _join(self, stages_done: int, earlier: int, waiting: int) -> int:
        """Return the optimal number of ``waiting`` to join a batch of ``earlier`` that is between two stages."""
        return self._joined(stages_done, earlier, waiting)[0]

    def _split(self, stage: int, num: int, waiting: int) -> list[int]:
        """Return the best sizes to split a batch of ``num`` into before ``stage``, with ``waiting`` behind it."""
        price = _PRICES[int(self._going_on(stage, num)[1][_capped(waiting)])]
        return sizes_by_cost(self.costs, stage, num, num_behind=price, length=self.length)

    def _run_to(self, stage: int, num: int, waiting: int) -> int:
        """Return the last stage to run from ``stage`` on, for a batch of ``num``, without being asked in between.

        To ask costs a task more for all that wait; it may gain what a split or a stretch would, by who comes meanwhile.
        """
        run_s, last = 0.0, stage
        while last < self.costs.num_stages - 1:
            run_s += self.costs.stage_s(last, num, self.length)
            if run_s > LONGEST_RUN_S or len(self.split(last + 1, num, waiting)) > 1:
                break
            coming = poisson(self.rate * run_s)[:16]
            gained_s = sum(
                chance * self._joined(last + 1, num, waiting + number)[1]
                for number, chance in enumerate(coming)
                if chance > 1e-3
            )
            if gained_s > TASK_S * (num + waiting + self.rate * self._slope(waiting)):
                break
            last += 1
        return last

    # -- below ------------------------------------------------------------------------------------------------------

    def _joined(self, stages_done: int, earlier: int, waiting: int) -> tuple[int, float]:
        """Return the optimal number of joiners and the waiting time saved, in seconds."""
        waiting = _capped(waiting)
        room = min(waiting, self.max_batch_size - earlier)
        apart_s = float(self._going_on(stages_done, earlier)[0][waiting])
        best, gained_s = 0, 0.0
        for late in [*(size for size in self._sizes if size < room), *([room] if room > 0 else [])]:
            catch_s = catch_up_s(self.costs, stages_done, late, self.length) + 2 * TASK_S
            coming = self.rate * catch_s
            fewer = int(coming)
            worth, _ = self._going_on(stages_done, earlier + late)
            left = _capped(waiting - late + fewer)
            joined_s = (earlier + waiting + coming / 2 - self._gain) * catch_s
            joined_s += float(worth[left] + (coming - fewer) * (worth[_capped(left + 1)] - worth[left]))
            stake_s = (earlier + late) * remaining_s(self.costs, stages_done, earlier + late, self.length)
            if apart_s - joined_s > max(gained_s, HYSTERESIS * stake_s):
                best, gained_s = late, apart_s - joined_s
        return best, gained_s

    def _worth_of_going_on(self, stage: int, num: int) -> tuple[Vector, NDArray[np.intp]]:
        """Return the value of going on from ``stage`` with ``num``, and the best price for splits, by number waiting.

        Both are arrays [number waiting].
        """
        options = np.stack([self._after(*self._rest(stage, num, price)) for price in _PRICES])
        return options.min(0), options.argmin(0)

    def _rest(self, stage: int, num: int, price: int) -> tuple[float, float]:
        """Return the summed waiting and the work of ``num`` from ``stage`` on; the first stage runs in one piece."""
        if stage:
            return planned_split(self.costs, stage, num, price, self.length)
        waiting_s, work_s = planned_split(self.costs, 1, num, price, self.length)
        stage_s = self.costs.stage_s(0, num, self.length)
        return num * stage_s + waiting_s, stage_s + work_s

    def _after(self, own_s: float, work_s: float) -> Vector:
        """Return the value of 0, 1, ... waiting while a batch works ``work_s`` and its requests wait ``own_s``."""
        coming = self.rate * work_s
        worth: Vector = np.correlate(self._values, poisson(coming), "valid")[:_NUM_STATES]
        return own_s + (np.arange(_NUM_STATES) + coming / 2 - self._gain) * work_s + worth

    def _slope(self, waiting: int) -> float:
        waiting = _capped(waiting)
        return float(self._values[waiting + 1] - self._values[waiting])

    def _solve(self) -> tuple[Vector, float, list[int]]:
        """Return the values of 0, 1, ... waiting, the average waiting, and the best action for each, by iteration.

        The method is policy iteration.
        """
        top, rate, numbers = _NUM_STATES - 1, self.rate, np.arange(_NUM_STATES)
        chances = [poisson(rate * work_s) for _, _, work_s in self._ways]
        ways = self._ways
        cheapest = min(ways, key=lambda way: way[2] / way[0])[0]
        chosen = [0] * (top + 1)
        for index in sorted(range(len(ways)), key=lambda index: (ways[index][0], -ways[index][2])):
            size = ways[index][0]  # first guess: all that wait, in the cheapest size at most
            if size <= cheapest:
                chosen[size:] = [index] * (top + 1 - size)
        known: tuple[Vector, float, list[int]] | None = None
        for _ in range(50):
            moves, waits_s, takes_s = np.zeros((top + 1, top + 1)), np.zeros(top + 1), np.zeros(top + 1)
            moves[0, 1], takes_s[0] = 1.0, 1 / rate
            for waiting in range(1, top + 1):
                size, own_s, work_s = self._ways[chosen[waiting]]
                left = waiting - size
                moves[waiting, left:] = chances[chosen[waiting]][: top + 1 - left]
                lost = 1 - float(moves[waiting].sum())
                beyond = left + rate * work_s - float(moves[waiting] @ numbers) - top * lost
                moves[waiting, top] += lost + beyond  # values grow on as at the end, as in _extended
                moves[waiting, top - 1] -= beyond
                takes_s[waiting] = work_s
                waits_s[waiting] = own_s + (left + rate * work_s / 2) * work_s
            usual = _most_usual(moves)  # the state whose value is set to 0: from one never seen, all are lost in noise
            system = np.eye(top + 1) - moves
            system[:, usual] = takes_s
            with threadpool_limits(1, user_api="blas"):  # 2 ms; threads that wait for busy cores made it 70
                try:
                    solution = np.linalg.solve(system, waits_s)
                except np.linalg.LinAlgError:
                    solution = np.full(top + 1, np.nan)
            # Costs as a busy machine measures them may lead to choices that have no value: some states are never left.
            if known is not None and not solution[usual] > 0:
                return known
            gain = float(solution[usual])
            solution[usual] = 0.0
            values = _extended(solution - solution[0])
            known = values, gain, chosen
            better = self._improved(values, gain, chances, chosen)
            if better == chosen:
                break
            chosen = better
        return values, gain, chosen

    def _improved(self, values: Vector, gain: float, chances: list[Vector], chosen: list[int]) -> list[int]:
        top = _NUM_STATES - 1
        best, better = np.full(top + 1, np.inf), np.array(chosen)
        for index, ((size, own_s, work_s), chance) in enumerate(zip(self._ways, chances, strict=True)):
            left = np.arange(top + 1 - size)
            later = np.correlate(values, chance, "valid")[: len(left)]
            worth = own_s + (left + self.rate * work_s / 2 - gain) * work_s + later
            gains = worth < best[size:] - 1e-12
            best[size:][gains] = worth[gains]
            better[size:][gains] = index
        return [int(index) for index in better]


def _capped(waiting: int) -> int:
    return min(waiting, _NUM_STATES - 1)


def poisson(mean: float) -> Vector:
    """Return the chances of 0, 1, ... arrivals; the last entry has all larger numbers too."""
    numbers = np.arange(_NUM_STATES)
    if mean <= 0:
        mean = 1e-12
    chances: Vector = np.exp(-mean + numbers * np.log(mean) - _LOG_FACTORIALS)
    chances[-1] += max(0.0, 1 - float(chances.sum()))
    return chances


def _most_usual(moves: Vector) -> int:
    """Return the most frequent state of a Markov chain, over its first dozens of steps."""
    chances = moves[0]
    for _ in range(32):
        chances = (chances + chances @ moves) / 2  # half the time it stays: no chain goes round in a circle
    return int(chances.argmax())


def _extended(values: Vector) -> Vector:
    """Return ``values`` with as many again, extrapolated with the last slope: a choice may leave that many."""
    slope = values[-1] - values[-2]
    extended: Vector = np.concatenate([values, values[-1] + slope * np.arange(1, len(values) + 1)])
    return extended


@lru_cache(maxsize=64)
def planner_for(costs: StageCosts, max_batch_size: int, utilisation: float, length: int) -> Planner:
    """Return the planner for a load, given as a share of the peak; each is built once, in some 0.1 s."""
    return Planner(costs, max_batch_size, utilisation / least_request_s(costs, max_batch_size, length), length)
