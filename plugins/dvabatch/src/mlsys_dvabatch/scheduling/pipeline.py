"""Batch table, batch queues and buffer pairs in one state machine: the three meta-operations (DVABatch, sections 5, 6).

Requests are ids, time is passed in, tensors are elsewhere. Each method is atomic: table and queues change together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from mlsys_dvabatch.scheduling.buffers import BufferPairs, ExecutorState
from mlsys_dvabatch.scheduling.table import BatchTable, Part, Row


class Pipeline:
    """The batches of one model between its stages.

    Args:
        num_stages: stages, each with one executor; counted from 0.
        num_pairs: buffer pairs of each executor: 1 is the serial manner, 2 or more the parallel one.

    Raises:
        InvalidInputError: a number is below 1.

    Example (Figure 8a and b: two requests, and two more while the second stage works):
        >>> pipeline = Pipeline(num_stages=3, num_pairs=2)
        >>> row = pipeline.new(["a", "b"], now=0.0)
        >>> part = pipeline.start(0); _ = pipeline.finish(0)
        >>> part = pipeline.start(1)
        >>> pipeline.stretch(["c", "d"]).status_map
        (2, 0, 0)
    """

    def __init__(self, num_stages: int, num_pairs: int = 2) -> None:
        self.table = BatchTable(num_stages)
        self.pairs = BufferPairs(num_stages, num_pairs)
        self.queues: list[deque[Part]] = [deque() for _ in range(num_stages)]
        self.working: list[Part | None] = [None] * num_stages
        self.num_stages = num_stages

    # -- meta-operations on what comes in ---------------------------------------------------------------------------

    def new(self, requests: Sequence[str], now: float, *, padded_length: int = 1, can_stretch: bool = True) -> Row:
        """Put a new batch of ``requests`` before the first stage, and return its row."""
        row = self.table.new(requests, created_s=now, padded_length=padded_length, can_stretch=can_stretch)
        self.queues[0].append(row.part())
        return row

    def stretchable(self) -> Row | None:
        """Return the latest batch if requests may join it: no split is foreseen and it is not in its last stage."""
        row = self.table.latest
        if row is None or not row.can_stretch or row.is_passing:
            return None
        if row.held_after is None and self._stage_at_work(row) == self.num_stages - 1:
            return None
        return row

    def stretch(self, requests: Sequence[str]) -> Row:
        """Let ``requests`` join the latest batch (see :meth:`stretchable`).

        The earlier part is held after the stage it is in, or was in last; the new requests run the stages up to there
        on their own and are merged with it. A part that has not started simply grows.
        """
        row = self.stretchable()
        assert row is not None
        waiting = next((part for part in self.queues[0] if part.batch_id == row.batch_id), None)
        earlier = self._only_part(row) if row.held_after is None else None
        self.table.stretch(requests)
        if waiting is not None:
            position = self.queues[0].index(waiting)
            self.queues[0][position] = Part(row.batch_id, waiting.start, (*waiting.requests, *requests))
            return row
        if row.held_after is None:
            assert earlier is not None
            row.held_after = self._hold(row, earlier)
        self.queues[0].append(row.part(requests))
        return row

    # -- executors --------------------------------------------------------------------------------------------------

    def is_at_work(self, row: Row) -> bool:
        """Return whether an executor runs a part of ``row``."""
        return self._stage_at_work(row) is not None

    def pass_on(self, stage: int) -> bool:
        """Note that ``stage`` has run its part and that the next stage goes on with it, in one run of several stages.

        No other part may wait for that stage. A run is not to be stretched (``row.is_passing``) until it ends.

        Returns:
            True if there is anything to go on with: all may have been cancelled.
        """
        pushed = self.finish(stage)
        part = self.start(stage + 1) if pushed else None
        assert not pushed or part is pushed[0]
        return part is not None

    def can_start(self, stage: int) -> bool:
        """Return whether :meth:`start` would hand out a part; changes nothing."""
        if self.working[stage] is not None or not self.queues[stage]:
            return False
        row = self.table[self.queues[stage][0].batch_id]
        if row.follows in self.table.rows:
            return False
        pair = self.pairs.free_pair() if row.pair is None else row.pair
        return pair is not None and self.pairs.is_legitimate(stage, pair)

    def longest_run(self, stage: int) -> int:
        """Return the last stage to which the next part of ``stage`` may run in one go.

        The stage itself if any part is further on, which may use the same buffers; and no further than where its batch
        is held.
        """
        if any(self.queues[stage + 1 :]) or any(part is not None for part in self.working[stage + 1 :]):
            return stage
        held_after = self.table[self.queues[stage][0].batch_id].held_after
        return self.num_stages - 1 if held_after is None or held_after < stage else held_after

    def put_first(self, stage: int, batch_id: int) -> None:
        """Let the part of ``batch_id`` that waits for ``stage`` start next."""
        queue = self.queues[stage]
        part = next(part for part in queue if part.batch_id == batch_id)
        queue.remove(part)
        queue.appendleft(part)

    def start(self, stage: int) -> Part | None:
        """Start the oldest part that waits for ``stage`` and return it; None if there is none or it may not run yet."""
        if self.working[stage] is not None or not self.queues[stage]:
            return None
        if self.pairs.executors[stage] is ExecutorState.INACTIVE:
            return None
        part = self.queues[stage][0]
        row = self.table[part.batch_id]
        if row.follows in self.table.rows:
            return None
        if row.pair is None:
            row.pair = self.pairs.free_pair()
            if row.pair is None:
                return None
        if not self.pairs.begin(stage, row.pair):
            return None
        self.queues[stage].popleft()
        self.working[stage] = part
        return part

    def finish(
        self,
        stage: int,
        *,
        leaving: Collection[str] = (),
        groups: Sequence[Sequence[str]] = (),
        serial: bool = True,
        foresee_split: bool = False,
    ) -> list[Part]:
        """Complete the part that ``stage`` has run: push it on, hold it, merge it with a held one, or split it.

        Args:
            stage: the executor.
            leaving: requests of the part that go no further (early exits; failed).
            groups: split the batch so; ignored unless the part is the whole batch. Those leaving need not be in them.
            serial: the children of the split run one after another.
            foresee_split: the batch is not to be stretched any more.

        Returns:
            The parts pushed to the next queue.
        """
        part, row, pair = self._ended(stage)
        for request in leaving:
            self.table.remove(request)
        alive = [request for request in part.requests if request in row.progress]
        for request in alive:
            row.progress[request] = stage + 1
        if foresee_split:
            row.can_stretch = False
        is_last = stage == self.num_stages - 1
        if is_last:
            for request in alive:
                self.table.remove(request)
            alive = []
        pushed = self._pushed(row, stage, alive, groups, serial)
        self.pairs.finish(stage, pair, num_read=part.num, num_written=len(alive), returns=not pushed)
        if pushed:
            self.queues[stage + 1].extend(pushed)
        self._close(row)
        return pushed

    def retry(self, stage: int) -> None:
        """Put the part that ``stage`` failed back as two halves, which are run again."""
        part, row, pair = self._ended(stage)
        alive = [request for request in part.requests if request in row.progress]
        self.pairs.retry(stage, pair)
        if len(alive) < part.num:
            self.pairs.discard(stage, pair, part.num - len(alive))
        middle = (len(alive) + 1) // 2
        halves = [half for half in (alive[:middle], alive[middle:]) if half]
        if len(alive) == row.size and halves and row.held_after is None:
            parts = [child.part() for child in self.table.split(row, halves, serial=False)]
        else:  # others catch up here, or did until now: the halves are merged after this stage
            parts = [row.part(half) for half in halves]
        self.queues[stage].extendleft(reversed(parts))
        self._close(row)

    def cancel(self, request: str) -> None:
        """Take ``request`` out: its batch is compacted; a part at work carries it to the end of its stage."""
        row = self.table.remove(request)
        pair = row.pair
        for stage, queue in enumerate(self.queues):
            for position, part in enumerate(queue):
                if part.batch_id == row.batch_id and request in part.requests:
                    self._shrink(stage, position, request, pair)
                    self._close(row)
                    return
        is_at_work = any(part is not None and request in part.requests for part in self.working)
        if not is_at_work and row.held_after is not None and pair is not None:
            self.pairs.discard(row.held_after + 1, pair, 1)
        self._close(row)

    # -- below ------------------------------------------------------------------------------------------------------

    def _ended(self, stage: int) -> tuple[Part, Row, int]:
        """Free a stage that was at work; return its part, the part's batch and the pair it moves through."""
        part = self.working[stage]
        assert part is not None
        self.working[stage] = None
        row = self.table[part.batch_id]
        assert row.pair is not None
        return part, row, row.pair

    def _pushed(
        self, row: Row, stage: int, alive: list[str], groups: Sequence[Sequence[str]], serial: bool
    ) -> list[Part]:
        if not alive:
            return []
        if row.held_after == stage:
            if any(done <= stage for done in row.progress.values()) or self._stage_at_work(row) is not None:
                return []  # held: those that catch up are not here yet
            self._release(row)
            alive = list(row.progress)
        if row.held_after is None and groups:
            kept = [[request for request in group if request in row.progress] for group in groups]
            kept = [group for group in kept if group]
            if len(kept) > 1 and sum(map(len, kept)) == row.size:
                return [child.part() for child in self.table.split(row, kept, serial=serial)]
        return [row.part(alive)]

    def _stage_at_work(self, row: Row) -> int | None:
        return next(
            (s for s, part in enumerate(self.working) if part is not None and part.batch_id == row.batch_id), None
        )

    def _only_part(self, row: Row) -> tuple[int, Part]:
        """Return the stage and the part of a batch that is in one piece."""
        for stage in range(self.num_stages):
            part = self.working[stage]
            for candidate in [*([part] if part is not None else []), *self.queues[stage]]:
                if candidate.batch_id == row.batch_id:
                    return stage, candidate
        raise AssertionError(f"batch {row.batch_id} is nowhere")

    def _hold(self, row: Row, earlier: tuple[int, Part]) -> int:
        """Hold a batch that is in one piece; returns the stage after which."""
        stage, part = earlier
        assert row.pair is not None
        if self.working[stage] is not part:
            self.queues[stage].remove(part)
            self.pairs.leave_checking(stage)
            stage -= 1
        self.pairs.hold(stage, row.pair)
        return stage

    def _release(self, row: Row) -> None:
        assert row.pair is not None
        self.pairs.release(row.pair, is_empty=not row.progress)
        row.held_after = None

    def _shrink(self, stage: int, position: int, request: str, pair: int | None) -> None:
        queue = self.queues[stage]
        part = queue[position]
        kept = tuple(other for other in part.requests if other != request)
        if kept:
            queue[position] = Part(part.batch_id, part.start, kept)
        else:
            del queue[position]
            if position == 0:
                self.pairs.leave_checking(stage)
        if pair is not None:
            self.pairs.discard(stage, pair, 1)

    def _close(self, row: Row) -> None:
        """Tidy up after requests left ``row``: end a hold that waits for nobody, and drop an empty row."""
        if row.batch_id not in self.table.rows or self._stage_at_work(row) is not None:
            return
        held_after = row.held_after
        if held_after is not None and all(done > held_after for done in row.progress.values()):
            self._release(row)
            if row.progress:
                self.queues[held_after + 1].append(row.part())
        if not row.progress:
            self.table.drop(row)
