"""Which worker runs what, and when: list scheduling over measured times (the CPU's stand-in for Algorithm 1).

An operator's work can be cut in as many pieces as there are workers, or run whole on one of them while others run its
neighbours. On a chain the first is right, on branches the second (no operator then waits for the slowest of its
pieces). Operators are taken by the length of the longest path that hangs on them, as in Kwok and Ahmad's survey
(1999) of list scheduling, and cut if there is not enough independent work to keep the other workers busy meanwhile.

Pure: seconds in, lists out. The executor measures the few best of :func:`candidates` and keeps the fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from mlsys_nimble.planning.storage import ancestors
from mlsys_nimble.planning.streams import Bits

SYNC_S = 0.5e-6  # what waiting for another worker costs


@dataclass(frozen=True, slots=True)
class Job:
    """An operator to be scheduled."""

    seconds: float  # on one worker
    units: int  # that it can be cut in
    dependencies: tuple[int, ...]  # jobs, all with smaller numbers


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a job on one worker's list, and what must have run elsewhere."""

    job: int
    part: int
    num_parts: int
    waits: tuple[tuple[int, int], ...] = ()  # (worker, how many pieces of its list must be done), at most one a worker

    def units(self, units: int) -> tuple[int, int]:
        """Its range of the job's units, begin and end."""
        return units * self.part // self.num_parts, units * (self.part + 1) // self.num_parts


@dataclass(frozen=True, slots=True)
class Assignment:
    """A list of pieces for each worker."""

    lists: tuple[tuple[Piece, ...], ...]
    seconds: float  # predicted

    @property
    def num_waits(self) -> int:
        """Synchronisations."""
        return sum(len(piece.waits) for pieces in self.lists for piece in pieces)


def candidates(jobs: Sequence[Job], num_workers: int, *, use_multi_stream: bool = True) -> list[Assignment]:
    """Assignments worth measuring, the most promising first; no two alike."""
    everything_cut = assign(jobs, num_workers, slack=float("inf"))
    if num_workers == 1 or not use_multi_stream:
        return [everything_cut]
    found = [everything_cut]
    for longest_s in (float("inf"), 1e-3, 300e-6, 100e-6, 30e-6):
        found += [assign(jobs, num_workers, slack=slack, longest_s=longest_s) for slack in (0.0, 1.0, 2.0)]
    distinct = {assignment.lists: assignment for assignment in found}
    return sorted(distinct.values(), key=lambda assignment: assignment.seconds)


def assign(
    jobs: Sequence[Job], num_workers: int, *, slack: float, longest_s: float = float("inf"), sync_s: float = SYNC_S
) -> Assignment:
    """One pass of list scheduling.

    Args:
        jobs: In an order that may be run.
        num_workers: 1 or more.
        slack: A job runs whole if the independent work left is at least this many times what the others could do
            meanwhile.
        longest_s: Longer jobs are always cut.
        sync_s: Added where a worker waits for another.
    """
    state = _State(jobs, num_workers, sync_s)
    for job in state.by_urgency():
        others_could_do = jobs[job].seconds * (num_workers - 1)
        is_whole = jobs[job].seconds <= longest_s and state.independent_seconds(job) >= slack * others_could_do
        if jobs[job].units < num_workers or num_workers == 1 or (is_whole and slack != float("inf")):
            state.place_whole(job)
        elif slack == float("inf") or state.cut_end(job) <= state.whole_end(job):
            state.place_cut(job)
        else:
            state.place_whole(job)
    return state.assignment()


class _State:
    """A schedule as it grows."""

    def __init__(self, jobs: Sequence[Job], num_workers: int, sync_s: float) -> None:
        self.jobs = jobs
        self.sync_s = sync_s
        self.free = [0.0] * num_workers
        self.lists: list[list[Piece]] = [[] for _ in range(num_workers)]
        self.spots: list[dict[int, int]] = [{} for _ in jobs]  # worker: how many of its pieces are done with the job
        self.ends = [0.0] * len(jobs)
        self.waited = [[0] * num_workers for _ in range(num_workers)]  # [worker][other]: what it has waited for
        before = ancestors([job.dependencies for job in jobs])
        after: list[Bits] = [0] * len(jobs)
        for index in reversed(range(len(jobs))):
            for needed in jobs[index].dependencies:
                after[needed] |= after[index] | 1 << index
        self.related = [a | b | 1 << i for i, (a, b) in enumerate(zip(before, after, strict=True))]
        self.left: Bits = (1 << len(jobs)) - 1
        self.seconds_left = sum(job.seconds for job in jobs)

    def by_urgency(self) -> list[int]:
        """Jobs in the order they are taken: of those whose dependencies are taken, the one with the longest tail."""
        tail = [job.seconds for job in self.jobs]
        consumers: list[list[int]] = [[] for _ in self.jobs]
        for index in reversed(range(len(self.jobs))):
            for needed in self.jobs[index].dependencies:
                tail[needed] = max(tail[needed], self.jobs[needed].seconds + tail[index])
        missing = [len(job.dependencies) for job in self.jobs]
        for index, job in enumerate(self.jobs):
            for needed in job.dependencies:
                consumers[needed].append(index)
        ready = [(-tail[index], index) for index, count in enumerate(missing) if count == 0]
        heapify(ready)
        order = []
        while ready:
            _, index = heappop(ready)
            order.append(index)
            for consumer in consumers[index]:
                missing[consumer] -= 1
                if missing[consumer] == 0:
                    heappush(ready, (-tail[consumer], consumer))
        return order

    def independent_seconds(self, job: int) -> float:
        """Work not yet placed that neither needs the job nor is needed by it."""
        bits = self.left & ~self.related[job]
        total = 0.0
        while bits:
            lowest = bits & -bits
            total += self.jobs[lowest.bit_length() - 1].seconds
            bits ^= lowest
        return total

    def _start(self, job: int, worker: int) -> float:
        start = self.free[worker]
        for needed in self.jobs[job].dependencies:
            spots = self.spots[needed]
            is_elsewhere = len(spots) > 1 or worker not in spots
            start = max(start, self.ends[needed] + (self.sync_s if is_elsewhere else 0.0))
        return start

    def _best_worker(self, job: int) -> int:
        return min(range(len(self.free)), key=lambda worker: (self._start(job, worker), worker))

    def whole_end(self, job: int) -> float:
        return self._start(job, self._best_worker(job)) + self.jobs[job].seconds

    def cut_end(self, job: int) -> float:
        start = max(self._start(job, worker) for worker in range(len(self.free)))
        return start + self.jobs[job].seconds / len(self.free)

    def place_whole(self, job: int) -> None:
        worker = self._best_worker(job)
        self.ends[job] = self.free[worker] = self.whole_end(job)
        self._append(job, worker, 0, 1)
        self._taken(job)

    def place_cut(self, job: int) -> None:
        end = self.cut_end(job)
        pieces = len(self.free)
        for worker in range(pieces):
            self._append(job, worker, worker, pieces)
        self.free = [end] * pieces
        self.ends[job] = end
        self._taken(job)

    def _taken(self, job: int) -> None:
        self.left ^= 1 << job

    def _append(self, job: int, worker: int, part: int, num_parts: int) -> None:
        wanted: dict[int, int] = {}
        for needed in self.jobs[job].dependencies:
            for other, count in self.spots[needed].items():
                if other != worker and count > max(wanted.get(other, 0), self.waited[worker][other]):
                    wanted[other] = count
        for other, count in wanted.items():
            self.waited[worker][other] = count
        self.lists[worker].append(Piece(job, part, num_parts, tuple(sorted(wanted.items()))))
        self.spots[job][worker] = len(self.lists[worker])

    def assignment(self) -> Assignment:
        return Assignment(tuple(map(tuple, self.lists)), max(self.ends, default=0.0))
