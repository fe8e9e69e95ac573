"""The seam between an engine and who places and connects the ranks of its divided model.

Processes forked on this host (:mod:`.group`) are one implementation; a *placement* policy that a plugin registers
brings another, such as the actors of a Ray cluster. An engine asks for a group, has it serve a replica, submits one
frozen message an iteration, and hears of the first death: what follows is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mlsys_orca.parallel.placement import Placement, all_places

if TYPE_CHECKING:
    from mlsys_serving.processes import Death
    from mlsys_serving.processes.children import Standing

    from mlsys_orca.parallel.executor import IterationWatch
    from mlsys_orca.parallel.holder import Loaded
    from mlsys_orca.parallel.messages import Done, Hello
    from mlsys_orca.parallel.shard import Reducer, Shard
    from mlsys_orca.parallel.wiring import GroupShape
    from mlsys_orca.scheduling.batch import IterationBatch, IterationOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelModel:
    """Division of one model, and the functions that load its parts. Plain data."""

    tensor_parallel: int
    pipeline_parallel: int
    load: Callable[[Placement], Shard]
    hello_of: Callable[[Shard], Hello]
    expected: Hello  # of a rank with the master's code and model
    reducer_of: Callable[[Placement, int], Reducer] | None = None
    new_reducer: Callable[[GroupShape], int] | None = None  # makes the memory in which the ranks of a stage meet
    placer: RankPlacer | None = None  # who places the ranks; None: they are forked on this host

    @property
    def places(self) -> list[Placement]:
        """All places."""
        return all_places(tensor_parallel=self.tensor_parallel, pipeline_parallel=self.pipeline_parallel)


class RankExecutor(Protocol):
    """Executor of core's loop over the ranks of a group; see :class:`~.executor.ParallelExecutor`."""

    max_in_flight: int

    @property
    def waits_for(self) -> str:
        """Reason why ranks do not come, to be read from any thread; empty: there is none."""
        ...

    def serve(self, replica: int, *, timeout_s: float | None = None) -> str:
        """Have the ranks use a replica's keys and values; return the identity of their memory.

        Raises:
            GroupBrokenError: a rank is lost.
            ServingError: a rank does not come, or has other code or another model.
        """
        ...

    def submit(self, batch: IterationBatch) -> None:
        """Take an iteration; the next ``wait`` sends it."""
        ...

    def wait(self, timeout_s: float | None) -> tuple[IterationBatch, IterationOutput | BaseException] | None:
        """Return the oldest iteration with its output; None when interrupted, or after ``timeout_s``.

        Raises:
            GroupBrokenError: a rank is lost.
        """
        ...

    def interrupt(self) -> None:
        """Make a ``wait`` in progress, or the next one, return soon."""
        ...

    def close(self) -> None:
        """Let the ranks go. Idempotent."""
        ...


class RankGroup(Protocol):
    """Ranks of one master; see :class:`~.group.Group`."""

    def executor(
        self, *, watch: IterationWatch | None = None, on_done: Callable[[Done], None] | None = None
    ) -> RankExecutor:
        """Return the executor over the ranks; once."""
        ...

    def cause(self, timeout_s: float | None) -> Death | None:
        """Wait for the death of a rank and return it; None: none within the time, or nobody knows of what."""
        ...

    def close(self) -> None:
        """Let the ranks go. Idempotent."""
        ...


class RankHolders(Protocol):
    """Processes that have the parts of a model, for as long as the server lives; see :class:`~.group.Holders`."""

    model: ParallelModel
    loaded: list[Loaded]  # by place, after start()
    available_nbytes: int | None  # memory for keys and values of a replica, if this machine's does not say it

    @property
    def standing(self) -> Sequence[Standing]:
        """Children of this process that the supervisor keeps."""
        ...

    def start(self) -> None:
        """Fork the children and wait for all parts: :meth:`fork`, then :meth:`wait`."""
        ...

    def fork(self) -> None:
        """Fork the children. This process must have a single thread."""
        ...

    def wait(self) -> None:
        """Wait for all parts.

        Raises:
            InvalidInputError: a part cannot be loaded.
            ServingError: a child has ended.
        """
        ...

    def group(self, shape: GroupShape) -> RankGroup:
        """Return a new group of ranks."""
        ...

    def close(self) -> None:
        """End the children and their ranks. Idempotent."""
        ...


class RankPlacer(Protocol):
    """Placement of a model's ranks; the factory of a ``placement`` policy makes one.

    The factory takes the model as the command names it, and the keywords of
    :class:`~mlsys_orca.cli.placing.PlacedModel`; it refuses what does not fit by ``InvalidInputError``.
    """

    def holders(self, model: ParallelModel, *, num_replicas: int, say: Callable[[str], None]) -> RankHolders:
        """Return the holders of a model's parts.

        Args:
            model: Its parts.
            num_replicas: Engines that have keys and values of their own.
            say: Called with each line about ranks, in processes of their own.
        """
        ...
