"""Decide by measurement when an executor is made: kernels of operators, and assignments of segments."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlsys_core.config import settings
from mlsys_core.profiling.files import atomic_write
from mlsys_nimble.backends.cpu import library
from mlsys_nimble.backends.cpu.library import Kernel, View
from mlsys_nimble.backends.cpu.lowering import other_kernels
from mlsys_nimble.backends.cpu.replay import ReplayPlan, Team
from mlsys_nimble.ir.program import Operator, Program, ValueId
from mlsys_nimble.planning.planner import RULES, Assignment, Job, candidates
from mlsys_nimble.planning.schedule import Segment
from torch import Tensor


class Choices:
    """Measured choices, in one file for each build of the kernels (and so for each kind of processor).

    Args:
        cache_dir: Folder with the file below ``nimble/``. If several processes write it, the last one's choices stay.
    """

    def __init__(self, cache_dir: Path) -> None:
        self._path = cache_dir / "nimble" / f"{Path(library.load()._name).stem}.json"
        try:
            known = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # missing or damaged: kernels are measured again
            known = {}
        self.known: dict[str, str] = known if isinstance(known, dict) else {}

    @staticmethod
    def text(operator: Operator, views: Mapping[ValueId, View]) -> str:
        """Return the key of a choice: the operator's kind, and its tensors' shapes and strides."""
        tensors = (views[value] for value in (*operator.inputs, *operator.outputs))
        return f"{operator.kind} {[(view.shape, view.strides) for view in tensors]}"

    def learn(self, found: Mapping[str, str]) -> None:
        """Add choices, and save them; if the folder cannot be written to, later processes measure again."""
        self.known.update(found)
        if found:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(self._path) as file:
                    file.write(json.dumps(self.known, indent=0).encode())
            except OSError:
                pass


MEASURED = 4  # assignments that are tried by the clock
MEASURE_S = 0.15  # seconds for each of them, and for the times of single kernels
USUAL = "usual"


@dataclass(frozen=True, slots=True)
class TaskTime:
    """Begin and end of one task of a replay, in nanoseconds of the steady clock."""

    operator: str
    part: int
    num_parts: int
    worker: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Decisions:
    """Decisions of one executor, by which another is made without measuring."""

    num_threads: int
    kernels: Mapping[str, str]  # by operator: kernel other than the default
    seconds: Mapping[str, float]  # by operator: time of its kernel on one thread
    assignments: tuple[int, ...]  # by segment: rule of its assignment (planner.RULES); valid for `num_threads`
    packed: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)  # by operator: weights in the kernel's layout

    def rule(self, segment: int, num_threads: int) -> int:
        """Return the rule of a segment's assignment; the first one where it was decided for other threads."""
        is_known = num_threads == self.num_threads and segment < len(self.assignments)
        return self.assignments[segment] if is_known and self.assignments[segment] in range(len(RULES)) else 0


class Measuring:
    """Measurements of one program's kernels in whole replays.

    Args:
        program: After the layout.
        views: Memory of its values.
        fixed: Constants that never change.
        kernels: Kernels by operator; :meth:`choose` replaces slower ones.
        team: Workers.
        num_threads: Number of workers.
    """

    def __init__(
        self,
        program: Program,
        views: Mapping[ValueId, View],
        fixed: Mapping[ValueId, Tensor],
        kernels: dict[int, Kernel],
        team: Team,
        num_threads: int,
    ) -> None:
        self._program, self._views, self._fixed, self._kernels = program, views, fixed, kernels
        self._team, self._num_threads = team, num_threads

    def choose(self, segments: Sequence[Segment], winograd: int) -> tuple[dict[int, str], dict[int, float]]:
        """Replace kernels by faster ones for the same operator: each kind takes its turn in whole replays.

        Returns:
            Names of the kernels that are not the usual ones, and the seconds of every kernel, by operator.
        """
        seconds = self._measured(segments)
        choices = Choices(settings().cache_dir)
        others = {
            index: found
            for index, kernel in self._kernels.items()
            if not kernel.is_in_place
            and (found := other_kernels(self._program.operators[index], self._views, self._fixed, winograd=winograd))
        }
        usual = {index: self._kernels[index] for index in others}
        texts = {
            index: f"{', '.join(found)}: {choices.text(self._program.operators[index], self._views)}"
            for index, found in others.items()
        }
        unknown = {index for index in others if texts[index] not in choices.known}
        best = {index: (USUAL, seconds[index]) for index in unknown}
        for name in dict.fromkeys(name for index in unknown for name in others[index]):
            for index in unknown:
                self._kernels[index] = others[index][name]() if name in others[index] else usual[index]
            for index, took in self._measured(segments).items():
                if index in unknown and took < best[index][1]:
                    best[index] = (name, took)
        choices.learn({texts[index]: name for index, (name, _) in best.items()})
        names = {index: name for index in others if (name := choices.known[texts[index]]) in others[index]}
        for index in others:
            self._kernels[index] = others[index][names[index]]() if index in names else usual[index]
        if others:
            seconds.update(self._measured(segments))
        return names, seconds

    def fastest(self, segment: Segment, found: Sequence[Assignment], seconds: Mapping[int, float]) -> Assignment:
        """Return the assignment with the fastest replay. They take turns, since other processes come and go."""
        if len(found) == 1 or not segment.operators:
            return found[0]
        plans = [plan_of(segment, assignment, self._kernels, seconds, self._num_threads) for assignment in found]
        least = [float("inf")] * len(plans)
        begin, rounds = time.perf_counter(), 0
        while rounds < 4 or time.perf_counter() - begin < MEASURE_S * len(plans):
            for number, plan in enumerate(plans):
                before = time.perf_counter()
                self._team.run(plan)
                least[number] = min(least[number], time.perf_counter() - before)
            rounds += 1
        return found[least.index(min(least))]

    def timed(self, segment: Segment, assignment: Assignment, plan: ReplayPlan) -> list[TaskTime]:
        """Replay a segment and return the times of its tasks, worker after worker."""
        pieces = [(worker, piece) for worker, pieces in enumerate(assignment.lists) for piece in pieces]
        names = [self._program.operators[segment.operators[piece.job]].name for _, piece in pieces]
        return [
            TaskTime(name, piece.part, piece.num_parts, worker, *times)
            for name, (worker, piece), times in zip(names, pieces, self._team.run_timed(plan), strict=True)
        ]

    def _measured(self, segments: Sequence[Segment]) -> dict[int, float]:
        """Return the seconds of each kernel on one thread: medians of replays in program order, with warm caches."""
        seconds: dict[int, float] = {}
        for segment in segments:
            jobs = [Job(1.0, self._kernels[index].units, ()) for index in segment.operators]
            alone = candidates(jobs, 1)[0] if jobs else Assignment(((),), 0.0)
            plan = plan_of(segment, alone, self._kernels, {}, self._num_threads)
            samples: list[list[TaskTime]] = []
            begin = time.perf_counter()
            while len(samples) < 3 or (len(samples) < 15 and time.perf_counter() - begin < MEASURE_S):
                samples.append(self.timed(segment, alone, plan))
            order = [piece.job for piece in alone.lists[0]]
            for position, job in enumerate(order):
                times = [sample[position].end_ns - sample[position].begin_ns for sample in samples]
                seconds[segment.operators[job]] = statistics.median(times) * 1e-9
        return seconds


def plan_of(
    segment: Segment,
    assignment: Assignment,
    kernels: Mapping[int, Kernel],
    seconds: Mapping[int, float],
    num_threads: int,
) -> ReplayPlan:
    """Return the replay plan of a segment; kernels and seconds are by operator."""
    of_jobs = {job: kernels[operator] for job, operator in enumerate(segment.operators)}
    took = {job: seconds[operator] for job, operator in enumerate(segment.operators) if operator in seconds}
    return ReplayPlan(assignment, of_jobs, num_threads, took)


def jobs_of(
    segment: Segment, kernels: Mapping[int, Kernel], seconds: Mapping[int, float], needed: Sequence[Sequence[int]]
) -> list[Job]:
    """Return a segment's operators as the planner takes them; ``needed`` has the dependencies of every operator."""
    number = {operator: job for job, operator in enumerate(segment.operators)}
    return [
        Job(
            seconds[operator],
            kernels[operator].units,
            tuple(number[other] for other in needed[operator] if other in number),
        )
        for operator in segment.operators
    ]
