"""Every run of small pipelines: no hazard, no deadlock, one pair means serial, merges only when complete.

The search starts requests, stretches, splits, fails and cancels in every order that the pipeline allows, and keeps a
shadow of what the buffers hold: it knows nothing of the states, only which rows were written and not yet read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
from mlsys_dvabatch.scheduling.buffers import BufferState, ExecutorState
from mlsys_dvabatch.scheduling.pipeline import Pipeline
from mlsys_dvabatch.scheduling.table import Row


class Model:
    """A pipeline, what its buffers hold, and which requests have come and gone."""

    def __init__(self, num_stages: int, num_pairs: int, sizes: tuple[int, ...], faults: int) -> None:
        self.pipeline = Pipeline(num_stages, num_pairs)
        self.to_come = list(sizes)  # groups of requests, each a new batch or a stretch
        self.rows: dict[tuple[int, int], frozenset[str]] = {}  # (boundary, pair) -> written, not yet read
        self.reading: set[tuple[int, int]] = set()
        self.writing: set[tuple[int, int]] = set()
        self.gone: set[str] = set()
        self.faults = faults  # cancellations and failures left
        self.last = 0  # stage of the run under way, if there is one

    def key(self) -> object:
        pipeline = self.pipeline
        first = min(pipeline.table.rows, default=0)  # names of batches and requests do not matter, only their order

        def follows(row: Row) -> int | None:
            return row.follows - first if row.follows in pipeline.table.rows else None

        rows = tuple(
            (
                r.batch_id - first,
                tuple(r.progress.items()),
                r.can_stretch,
                r.held_after,
                r.is_passing,
                r.pair,
                follows(r),
            )
            for r in pipeline.table.rows.values()
        )
        name = lambda part: None if part is None else (part.batch_id - first, part.requests)  # noqa: E731
        pairs = pipeline.pairs
        return (
            rows,
            tuple(tuple(map(name, queue)) for queue in pipeline.queues),
            tuple(map(name, pipeline.working)),
            tuple(pairs.executors),
            tuple(map(tuple, pairs.buffers)),
            tuple(map(tuple, pairs.unread)),
            tuple(map(frozenset, pairs._owed)),
            tuple(pairs._restore),
            tuple(sorted(pairs.reserved.items())),
            tuple(self.to_come),
            self.faults,
            self.last,
        )

    def moves(self) -> Iterator[tuple[object, ...]]:
        pipeline = self.pipeline
        if self.to_come:
            yield ("new",)
            if pipeline.stretchable() is not None:
                yield ("stretch",)
        for stage in range(pipeline.num_stages):
            if pipeline.can_start(stage):
                yield ("start", stage)
                if pipeline.longest_run(stage) > stage:
                    yield ("run", stage)
            part = pipeline.working[stage]
            if part is None:
                continue
            if pipeline.table[part.batch_id].is_passing:
                yield ("pass_on", stage)
                if part.num > 1 and self.faults:
                    yield ("retry", stage)
                continue
            yield ("finish", stage, False)
            if part.num > 1:
                yield ("finish", stage, True)
                if self.faults:
                    yield ("retry", stage)
        if self.faults:
            for request in pipeline.table.batch_of:
                yield ("cancel", request)

    def apply(self, move: tuple[object, ...]) -> Model:
        after = copy.deepcopy(self)
        getattr(after, f"do_{move[0]}")(*move[1:])
        after.check()
        return after

    def come(self) -> list[str]:
        size = self.to_come.pop()
        return [f"{len(self.to_come)}.{number}" for number in range(size)]

    def do_new(self) -> None:
        self.pipeline.new(self.come(), 0.0)

    def do_stretch(self) -> None:
        self.pipeline.stretch(self.come())

    def do_start(self, stage: int) -> None:
        part = self.pipeline.start(stage)
        assert part is not None
        row = self.pipeline.table[part.batch_id]
        source, target = (stage, row.pair), (stage + 1, row.pair)
        assert source not in self.writing, "read while it is written"
        assert target not in self.reading | self.writing, "written while it is in use"
        if stage:
            assert set(part.requests) <= self.rows.get(source, frozenset()), "read what is not there"
        strangers = self.rows.get(target, frozenset()) - set(row.progress)
        assert not strangers, "overwritten before it was read"
        self.reading.add(source)
        self.writing.add(target)

    def do_run(self, stage: int) -> None:
        """Two stages or more in one go, decided when it starts."""
        self.last = self.pipeline.longest_run(stage)
        self.do_start(stage)
        self.pipeline.table[self.pipeline.working[stage].batch_id].is_passing = True

    def do_pass_on(self, stage: int) -> None:
        """The whole run has ended: through its stages at once, as the scheduler does."""
        row = self.pipeline.table[self.pipeline.working[stage].batch_id]
        for at in range(stage, self.last):
            source, target, requests = self._end(at)
            alive = {r for r in self.pipeline.working[at].requests if r in self.pipeline.table.batch_of}
            went_on = self.pipeline.pass_on(at)
            self.rows[source] = self.rows.get(source, frozenset()) - requests
            self.rows[target] = self.rows.get(target, frozenset()) | alive
            assert went_on == bool(alive)
            if not went_on:
                return
            self.reading.add((at + 1, row.pair))
            self.writing.add((at + 2, row.pair))
        row.is_passing = False

    def _end(self, stage: int) -> tuple[tuple[int, int], tuple[int, int], set[str]]:
        part = self.pipeline.working[stage]
        pair = self.pipeline.table[part.batch_id].pair
        self.reading.remove((stage, pair))
        self.writing.remove((stage + 1, pair))
        return (stage, pair), (stage + 1, pair), set(part.requests)

    def do_finish(self, stage: int, split: bool) -> None:
        source, target, requests = self._end(stage)
        alive = [r for r in self.pipeline.working[stage].requests if r in self.pipeline.table.batch_of]
        row = self.pipeline.table[self.pipeline.working[stage].batch_id]
        groups = [list(row.progress)[:1], list(row.progress)[1:]] if split else ()
        pushed = self.pipeline.finish(stage, groups=groups, serial=True)
        self.rows[source] = self.rows.get(source, frozenset()) - requests
        if stage == self.pipeline.num_stages - 1:
            assert not self.gone & set(alive)
            self.gone |= set(alive)
            return
        self.rows[target] = self.rows.get(target, frozenset()) | set(alive)
        for part in pushed:
            pushed_row = self.pipeline.table[part.batch_id]
            assert all(pushed_row.progress[r] == stage + 1 for r in part.requests)
            if pushed_row.held_after is None:
                assert part.requests == tuple(pushed_row.progress), "pushed on before it was complete"
                assert pushed_row.status_map[stage] == pushed_row.size

    def do_retry(self, stage: int) -> None:
        source, _, requests = self._end(stage)
        self.faults -= 1
        self.pipeline.table[self.pipeline.working[stage].batch_id].is_passing = False
        self.pipeline.retry(stage)
        dead = requests - self.pipeline.table.batch_of.keys()
        self.rows[source] = self.rows.get(source, frozenset()) - dead

    def do_cancel(self, request: str) -> None:
        self.faults -= 1
        at_work = {r for part in self.pipeline.working if part is not None for r in part.requests}
        self.pipeline.cancel(request)
        self.gone.add(request)
        if request not in at_work:
            self.rows = {where: held - {request} for where, held in self.rows.items()}

    def check(self) -> None:
        pipeline, pairs = self.pipeline, self.pipeline.pairs
        working = [s for s in range(pipeline.num_stages) if pairs.executors[s] is ExecutorState.WORKING]
        assert working == [s for s, part in enumerate(pipeline.working) if part is not None]
        if pairs.num_pairs == 1:
            assert len(working) <= 1, "one pair, but two executors at work"
        states = [state for boundary in pairs.buffers for state in boundary]
        assert states.count(BufferState.INREADING) == states.count(BufferState.INWRITING) == len(working)
        for boundary in range(1, pipeline.num_stages):
            for pair in range(pairs.num_pairs):
                held = self.rows.get((boundary, pair), frozenset())
                assert pairs.unread[boundary][pair] == len(held), "the count of unread rows is wrong"

    def check_end(self) -> None:
        """Nothing moves any more: then nothing is left, and the pipeline is as new."""
        pipeline = self.pipeline
        assert not pipeline.table.rows, "deadlock"
        assert not pipeline.table.batch_of
        assert not any(pipeline.queues)
        pairs = pipeline.pairs
        assert not pairs.reserved
        for stage in range(pipeline.num_stages):
            assert pairs.executors[stage] is ExecutorState.ACTIVE
        for pair in range(pairs.num_pairs):
            assert pairs.is_legitimate(0, pair), "a pair was lost"


def explore(model: Model, limit: int) -> int:
    seen = {model.key()}
    stack = [model]
    while stack:
        model = stack.pop()
        moves = list(model.moves())
        if not moves:
            model.check_end()
        progressing = [move for move in moves if move[0] != "cancel"]
        assert progressing or not moves, "only a cancellation could move it on"
        for move in moves:
            after = model.apply(move)
            key = after.key()
            if key not in seen:
                seen.add(key)
                stack.append(after)
        assert len(seen) <= limit, "the model is larger than it is meant to be"
    return len(seen)


@pytest.mark.parametrize("num_pairs", [1, 2])
@pytest.mark.parametrize(
    ("num_stages", "sizes", "faults"),
    [(2, (1, 1, 2), 0), (3, (1, 2), 0), (4, (1, 1, 1), 0), (2, (2, 2), 1), (3, (2, 1), 1), (3, (1, 1), 2)],
)
def test_every_run_of_a_small_pipeline(num_stages: int, num_pairs: int, sizes: tuple[int, ...], faults: int):
    assert explore(Model(num_stages, num_pairs, sizes, faults), limit=10_000) > 20
