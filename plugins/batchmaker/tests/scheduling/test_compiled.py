"""Compiled batching and completion against the oracle in Python: equal tasks, counters and answers."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_batchmaker.scheduling import state
from mlsys_batchmaker.scheduling.compiled import Compiled
from mlsys_batchmaker.scheduling.scheduler import CellularScheduler
from mlsys_batchmaker.scheduling.state import SchedulerConfig
from mlsys_batchmaker.scheduling.tasks import Round, Task
from mlsys_core.errors import KernelUnavailableError
from mlsys_core.loop import WorkerId

from .cellular import chain, fan, layout, outputs, seq2seq, tree
from .reference import Interpreted, scheduler_of

pytestmark = pytest.mark.usefixtures("kernel_level")

REQUESTS = st.one_of(
    st.tuples(st.just("chain"), st.integers(1, 9)),
    st.tuples(st.just("seq2seq"), st.integers(1, 5), st.integers(1, 7)),
    st.tuples(st.just("tree"), st.lists(st.integers(0, 20), max_size=9)),
    st.tuples(st.just("fan"), st.integers(1, 3)),
)
MAKE = {"chain": chain, "seq2seq": seq2seq, "tree": tree, "fan": fan}
STOP = 7


class Both:
    """Two schedulers, compiled and not, that must do the same."""

    def __init__(self, config: SchedulerConfig, num_workers: int, *, several_devices: bool) -> None:
        self.of = layout(stop=STOP)
        devices = range(num_workers) if several_devices else [0] * num_workers
        self.each = [
            scheduler_of(self.of, config=config, devices=devices, num_rows=[64, 64], compiled=is_compiled)
            for is_compiled in (True, False)
        ]
        assert isinstance(self.each[0]._state.calls, Compiled)
        assert isinstance(self.each[1]._state.calls, Interpreted)
        self.in_flight: list[list[tuple[Round, Round]]] = [[] for _ in devices]
        self.heard: tuple[list[object], list[object]] = ([], [])

    def add(self, kind: str, request_id: str, sizes: list[int], *, streams: bool) -> None:
        for scheduler, heard in zip(self.each, self.heard, strict=True):
            on_values = (lambda values, to=heard: to.append((request_id, str(values)))) if streams else None
            scheduler.add(MAKE[kind](self.of, request_id, *sizes, on_values=on_values), 0.0)

    def cancel(self, request_id: str) -> None:
        ours, theirs = (scheduler.cancel(request_id, 0.0) for scheduler in self.each)
        assert [each.request_id for each in ours] == [each.request_id for each in theirs]

    def submit(self, worker: int) -> bool:
        ours, theirs = (scheduler.next_batch(WorkerId(worker), 0.0) for scheduler in self.each)
        assert (ours is None) == (theirs is None)
        if ours is None or theirs is None:
            return False
        for one, other in zip(ours.tasks, theirs.tasks, strict=True):
            require_equal(one, other)
        self.in_flight[worker].append((ours, theirs))
        return True

    def complete(self, worker: int, seed: int, *, fails: bool) -> bool:
        if not self.in_flight[worker]:
            return False
        found = []
        for scheduler, batch in zip(self.each, self.in_flight[worker].pop(0), strict=True):
            rng = np.random.default_rng(seed)
            output = outputs(batch, self.of, word=lambda *_, rng=rng: int(rng.integers(0, STOP + 1)))
            left = scheduler.fail(batch, ValueError("no"), 1.0) if fails else scheduler.complete(batch, output, 1.0)
            found.append([(each.request_id, each.reason, str(each.result)) for each in left])
        assert sorted(found[0]) == sorted(found[1])
        self.require_equal_state()
        return True

    def require_equal_state(self) -> None:
        ours, theirs = (scheduler._state for scheduler in self.each)
        assert ours.counters == theirs.counters
        assert ours.running == theirs.running
        np.testing.assert_array_equal(ours.tables.subs, theirs.tables.subs)
        np.testing.assert_equal(ours.homes, theirs.homes)
        np.testing.assert_array_equal(ours.tables.node_waiting, theirs.tables.node_waiting)
        for one, other in zip(ours.ready, theirs.ready, strict=True):
            np.testing.assert_array_equal(one.peek(len(one)), other.peek(len(other)))
        assert self.heard[0] == self.heard[1]


def require_equal(ours: Task, theirs: Task) -> None:
    for each in fields(Task):
        if each.name != "address":
            np.testing.assert_equal(getattr(ours, each.name), getattr(theirs, each.name), each.name)


@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=8),
    num_workers=st.integers(1, 3),
    batching=st.sampled_from(["cell", "chunk"]),
    lookahead=st.sampled_from(["speculative", "one"]),
    max_tasks=st.integers(1, 5),
    streams=st.booleans(),
    several_devices=st.booleans(),
    data=st.data(),
)
def test_as_in_python(requests, num_workers, batching, lookahead, max_tasks, streams, several_devices, data):
    config = SchedulerConfig(max_tasks_to_submit=max_tasks, batching=batching, lookahead=lookahead)
    both = Both(config, num_workers, several_devices=several_devices)
    acts = data.draw(st.lists(st.integers(0, 10 * num_workers + 4), max_size=60), label="acts")
    waiting = [(f"r{number}", kind, sizes) for number, (kind, *sizes) in enumerate(requests)]
    added: list[str] = []
    for seed, act in enumerate(acts):
        if act < 4 and waiting:
            request_id, kind, sizes = waiting.pop(0)
            both.add(kind, request_id, sizes, streams=streams)
            added.append(request_id)
        elif act == 4 and added:
            both.cancel(added[seed % len(added)])
        elif act % 2:
            both.submit(act % num_workers)
        else:
            both.complete(act % num_workers, seed, fails=act == 10)
    for request_id, kind, sizes in waiting:
        both.add(kind, request_id, sizes, streams=streams)
    seed, is_busy = 1000, True
    while is_busy:
        acted = [both.submit(worker) or both.complete(worker, seed, fails=False) for worker in range(num_workers)]
        seed, is_busy = seed + 1, any(acted)
    assert not any(scheduler.num_unfinished for scheduler in both.each)


def test_large_tasks_and_queues():
    """Tasks and queues that outgrow the room they begin with."""
    of = layout(batch_sizes=(64, 512))
    schedulers = [
        scheduler_of(of, config=SchedulerConfig(batching="chunk"), compiled=is_compiled)
        for is_compiled in (True, False)
    ]
    for number in range(700):
        for scheduler in schedulers:
            scheduler.add(seq2seq(of, f"r{number}", 3 + number % 5, 2), 0.0)
    sizes = []
    while schedulers[0].num_unfinished:
        batches = [scheduler.next_batch(WorkerId(0), 0.0) for scheduler in schedulers]
        for ours, theirs in zip(*(batch.tasks for batch in batches if batch is not None), strict=True):
            require_equal(ours, theirs)
            sizes.append(ours.size * ours.steps * 2)
        for scheduler, batch in zip(schedulers, batches, strict=True):
            assert batch is not None
            scheduler.complete(batch, outputs(batch, of), 0.0)
    assert max(sizes) > 4096
    assert not schedulers[1].num_unfinished


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch):
    """The error names the way out; nothing slower runs instead."""

    def missing() -> None:
        raise KernelUnavailableError("no C++ compiler was found: apt-get install g++")

    monkeypatch.setattr(state, "load", missing)
    with pytest.raises(KernelUnavailableError, match="apt-get install"):
        CellularScheduler(layout())
