"""Requests in and out: blocks of node, subgraph and row numbers, and who waits for room (BatchMaker, section 4.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import FinishReason, QueueFullError
from mlsys_core.memory import RunPool, Runs

from mlsys_batchmaker.plan.plan import CELL, UNFINISHED, UNSUBMITTED, GraphPlan
from mlsys_batchmaker.scheduling.requests import CellRequest, Live, ValueStore
from mlsys_batchmaker.scheduling.state import State


class Room:
    """Several kinds of numbers at once, a run of each for a request.

    What a request gives back is kept as a whole for the next one of the same sizes, which most are; only when something
    is lacking are the kept ones taken apart.

    Args:
        kinds: the numbers of each kind.

    Example:
        >>> from mlsys_core.memory import RunPool
        >>> room = Room([RunPool(1, 9), RunPool()])
        >>> room.take((4, 2)), room.take((4, 2)), room.take((1, 1))
        ((1, 0), (5, 2), None)
        >>> room.give_back((4, 2), (1, 0))
        >>> room.take((2, 2))
        (1, 0)
    """

    def __init__(self, kinds: Sequence[Runs]) -> None:
        self.kinds = list(kinds)
        self.num_held = 0  # runs of all kinds that somebody holds count as one
        self._kept: dict[tuple[int, ...], list[tuple[int, ...]]] = {}

    def take(self, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the first number of a run of each kind; None if there is no room now."""
        kept = self._kept.get(sizes)
        starts = kept.pop() if kept else self._take(sizes)
        if starts is None and self._kept:
            self._take_apart()
            starts = self._take(sizes)
        self.num_held += starts is not None
        return starts

    def give_back(self, sizes: tuple[int, ...], starts: tuple[int, ...]) -> None:
        """Return what :meth:`take` gave for ``sizes``."""
        self._kept.setdefault(sizes, []).append(starts)
        self.num_held -= 1

    def _take(self, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        starts: list[int] = []
        for runs, size in zip(self.kinds, sizes, strict=True):
            start = runs.take(size)
            if start is None:
                for given, had, taken in zip(self.kinds, sizes, starts, strict=False):
                    given.give_back(taken, had)
                return None
            starts.append(start)
        return tuple(starts)

    def _take_apart(self) -> None:
        kept, self._kept = self._kept, {}
        for sizes, free in kept.items():
            for starts in free:
                for runs, start, size in zip(self.kinds, starts, sizes, strict=True):
                    runs.give_back(start, size)


_RETRY_AFTER_S = 1.0


class Admission:
    """Admitted requests, waiting requests, and the rows that each holds.

    Args:
        state: shared with batching and completion.
        num_rows: rows of each bank, the zero row included.
        store: gets the constants of admitted requests.
        new_rows: makes the pool of a bank's rows, from the first row and one above the last.
    """

    def __init__(
        self, state: State, num_rows: Sequence[int], store: ValueStore, new_rows: Callable[[int, int], Runs]
    ) -> None:
        self._state = state
        self._store = store
        self._rows = [new_rows(1, max(2, rows)) for rows in num_rows]
        self._nodes, self._subs, self._slots, self._indices = (RunPool() for _ in range(4))
        self.room = Room([*self._rows, self._nodes, self._subs, self._slots, self._indices])
        self._waiting: deque[tuple[CellRequest, float]] = deque()
        self.by_id: dict[str, Live] = {}
        self.by_index: dict[int, Live] = {}
        self.leaving: dict[int, Live] = {}  # have left, but something of theirs is in flight

    @property
    def num_unfinished(self) -> int:
        """Number of requests added that have not left."""
        return len(self.by_id) + len(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for room."""
        return len(self._waiting)

    def add(self, request: CellRequest, now: float) -> None:
        """Admit ``request``, or let it wait for room behind those that wait already.

        Raises:
            InvalidInputError: it can never have the rows it needs.
            QueueFullError: too many wait.
        """
        if self._waiting or not self._admit(request, now):
            self._check_fits(request.plan)
            bound = self._state.config.max_waiting
            if bound is not None and len(self._waiting) >= bound:
                raise QueueFullError(f"{bound} requests wait already: try again later", retry_after_s=_RETRY_AFTER_S)
            self._waiting.append((request, now))

    def go_on(self, live: Live, is_in_flight: bool, request: CellRequest) -> None:
        """Let ``live``, which has computed a part, go on as ``request``, its next one.

        If that must wait for room, it goes before all others that wait.

        Raises:
            InvalidInputError: it can never have the rows it needs; ``live`` is as it was.
        """
        self._check_fits(request.plan)
        self.finish(live, is_in_flight)
        if not self._admit(request, live.added_s):
            self._waiting.appendleft((request, live.added_s))

    def drop_waiting(self, request_id: str) -> bool:
        """Forget a request that waits for room; False if none of that id does."""
        for index, (request, _) in enumerate(self._waiting):
            if request.request_id == request_id:
                del self._waiting[index]
                return True
        return False

    def leave(self, live: Live, reason: FinishReason) -> None:
        """Finish ``live`` for its client; what it holds is freed as soon as nothing of it is in flight."""
        live.reason = reason
        del self.by_id[live.request.request_id]
        self._await_landing(live)
        plan, tables = live.request.plan, self._state.tables
        subs = slice(live.sub_start, live.sub_start + plan.num_subgraphs)
        if tables.sub_unsubmitted[subs].any():  # it leaves early: none of its other nodes may run any more
            cells = plan.subs[:, CELL]
            for cell in set(cells.tolist()):
                self._state.ready[cell].remove(tables.sub_rank[subs][cells == cell])

    def finish(self, live: Live, is_in_flight: bool) -> None:
        """Finish ``live`` with its results.

        No node of it is ready, but some may run in vain if a chain of it has stopped.
        """
        live.reason = FinishReason.DONE
        del self.by_id[live.request.request_id]
        if is_in_flight:
            self._await_landing(live)
        else:
            self._free(live)

    def free_what_left(self) -> None:
        """Free the blocks of requests that have left, and admit those who waited for them."""
        for index, live in list(self.leaving.items()) if self.leaving else ():
            if not self.is_in_flight(live):
                del self.leaving[index]
                self._free(live)
        while self._waiting and self._admit(*self._waiting[0]):
            self._waiting.popleft()

    def _await_landing(self, live: Live) -> None:
        """Keep the blocks of ``live`` for now, since something of it may be in flight."""
        self.leaving[live.index] = live
        self._state.tables.request_leaving[live.index] = 1

    def _check_fits(self, plan: GraphPlan) -> None:
        for bank, count in enumerate(plan.num_rows):
            if count and not self._rows[bank].fits(count):
                dtype, shape = self._state.layout.banks[bank]
                raise InvalidInputError(
                    f"the request needs {count} rows of {dtype}{list(shape)} at once, more than the state pool has; "
                    "send a smaller one, or give the server a larger pool"
                )

    def is_in_flight(self, live: Live) -> bool:
        """Return whether a worker has cells of ``live``."""
        tables = self._state.tables
        subs = slice(live.sub_start, live.sub_start + live.request.plan.num_subgraphs)
        return any(
            left != unsubmitted for unsubmitted, left in tables.subs[subs, UNSUBMITTED : UNFINISHED + 1].tolist()
        )

    def _admit(self, request: CellRequest, now: float) -> bool:
        starts = self.room.take(request.plan.blocks)
        if starts is None:
            return False
        *rows, node_start, sub_start, first_slot, index = starts
        live = Live(request, index, node_start, sub_start, starts, now, first_slot=first_slot)
        if request.earlier is not None:
            live.added_s, live.started_s = request.earlier.added_s, request.earlier.started_s
        self._state.results.reserve(self._slots.top)
        self._state.num_streaming += request.on_values is not None
        self._state.tables.reserve(self._nodes.top, self._subs.top, self._indices.top)
        self._write(live)
        self._store.load(rows, request.constants)
        self.by_id[request.request_id] = self.by_index[index] = live
        return True

    def _write(self, live: Live) -> None:
        """Write the request's rows of the tables; nodes that wait for nothing become ready."""
        plan, state = live.request.plan, self._state
        state.calls.admit(plan, [*live.starts[:-4], 0, *live.starts[-4:]])
        state.note_subgraphs(plan.kinds)
        if state.homes is not None:
            for homes, start, count in zip(state.homes, live.starts, plan.num_rows, strict=False):
                homes[start : start + count] = -1

    def _free(self, live: Live) -> None:
        plan, state = live.request.plan, self._state
        if plan.more or plan.sub_more:
            state.calls.forget(plan, live.node_start, live.sub_start)
        state.num_streaming -= live.request.on_values is not None
        self.room.give_back(plan.blocks, live.starts)
        del self.by_index[live.index]
