"""A worker's notes on its iterations, for whoever judges its death: whose they are, and by when they should end."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mlsys_orca.engine.crash_points import CrashPoints
from mlsys_orca.engine.iteration_trace import Run
from mlsys_orca.parallel.shard import GroupBrokenError
from mlsys_orca.scheduling.batch import IterationBatch, IterationOutput
from mlsys_serving.processes.box import Box
from mlsys_serving.processes.children import EXIT_UNHANDLED

if TYPE_CHECKING:
    from mlsys_orca.parallel.ranks import RankGroup

_LEAST_S = 5.0  # a starved machine may hold any thread up for seconds
_FACTOR = 8.0  # beyond the slowest so far: other work on the machine, longer contexts
_UNKNOWN_S = 60.0  # the first iterations touch memory for the first time; a token of theirs may take a second, too
_NUM_UNKNOWN = 3


class IterationDeadline:
    """Seconds that an iteration may take: several times the slowest so far, in proportion to its work.

    Args:
        slowest_s: As another worker found it; 0: unknown.
        most_work: Likewise.

    Example:
        >>> deadline = IterationDeadline(0.5, most_work=100)
        >>> deadline.limit_s(10), deadline.limit_s(200)
        (5.0, 8.0)
        >>> IterationDeadline().limit_s(2000.0)
        2000.0
    """

    def __init__(self, slowest_s: float = 0.0, *, most_work: float = 0.0) -> None:
        self.slowest_s, self.most_work = slowest_s, most_work
        self._num_unknown = 0 if slowest_s else _NUM_UNKNOWN

    def limit_s(self, work: float) -> float:
        """Return the seconds that an iteration may take: of ``work``, as :attr:`IterationBatch.work` counts it."""
        if self._num_unknown:
            return max(_UNKNOWN_S, work)
        return max(_LEAST_S, _FACTOR * self.slowest_s * max(1.0, work / self.most_work))

    def note(self, work: float, seconds: float) -> None:
        """Note an iteration that has ended."""
        self._num_unknown = max(0, self._num_unknown - 1)
        self.slowest_s, self.most_work = max(self.slowest_s, seconds), max(self.most_work, work)


_log = logging.getLogger(__name__)
_CAUSE_S = 5.0  # for word of what a rank died of


class WorkWatch:
    """Hears of each iteration as it begins and ends: :class:`~mlsys_orca.parallel.executor.IterationWatch`.

    Args:
        box: Where the process notes what it is at.
        points: Where a test has it killed.
        before: Called before an iteration runs, when the box has it.
    """

    def __init__(self, box: Box, points: CrashPoints, before: Callable[[], None]) -> None:
        self.deadline = IterationDeadline()
        self.ran_s = 0.0, 0.0  # begin and end of the last iteration, in seconds of the performance counter
        self._box, self._reach, self._before = box, points.reach, before
        self._flying: list[IterationBatch] = []  # iterations whose tokens nobody was told of, oldest first

    def begin(self, batch: IterationBatch) -> None:
        """Note that an iteration is about to run, here or on ranks."""
        self._flying.append(batch)
        self._note()
        self._reach("planned")
        self._before()

    def end(self, batch: IterationBatch, seconds: float) -> None:
        """Note that an iteration has run."""
        now = time.perf_counter()
        self.ran_s = now - seconds, now
        self.deadline.note(batch.work, seconds)
        self._reach("computed")

    def told(self, batch: IterationBatch) -> None:
        """Note that the front was told of an iteration; before, it was not known whose it is."""
        self._flying.remove(batch)
        self._note()

    def fail(self, error: BaseException) -> None:
        """End this process, whatever the error is: the front judges."""
        if isinstance(error, GroupBrokenError):
            time.sleep(_CAUSE_S)  # another thread ends this process, when it has heard of the cause
        _log.error("an iteration failed: this worker ends", exc_info=error)
        os._exit(EXIT_UNHANDLED)

    def around(self, run: Run) -> Run:
        """Return ``run`` with all of this around it."""

        def watched(batch: IterationBatch) -> IterationOutput:
            self.begin(batch)
            started_s = time.perf_counter()
            try:
                output = run(batch)
            except BaseException as error:
                self.fail(error)
                raise
            self.end(batch, time.perf_counter() - started_s)
            return output

        return watched

    def _note(self) -> None:
        """Write into the box whose iterations are under way."""
        if not self._flying:
            self._box.end()
            return
        handles = [int(part.request_id) for batch in self._flying for part in batch.requests]
        work = max(batch.work for batch in self._flying)
        self._box.begin(handles, limit_s=self.deadline.limit_s(work))


def die_with(group: RankGroup) -> None:
    """Have this process die as the first of the group's ranks does, by itself or of a signal; watched in a thread."""

    def watch() -> None:
        death = group.cause(None)
        if death is not None and death.is_crash and not death.is_out_of_memory:
            _log.error("a rank has died (%s): this worker ends", death)
            os._exit(EXIT_UNHANDLED)
        os.kill(os.getpid(), signal.SIGKILL)  # as the rank, or who held its part of the model

    threading.Thread(target=watch, name="orca-ranks", daemon=True).start()
