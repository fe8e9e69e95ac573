"""Admission: requests let in, requests that wait for room and their order, requests that grow part by part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from mlsys_batchmaker.scheduling.requests import CellRequest, CellResult, Constants
from mlsys_batchmaker.scheduling.scheduler import CellularScheduler
from mlsys_batchmaker.scheduling.state import SchedulerConfig
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import Finished, FinishReason, QueueFullError, WorkerId

from . import reference
from .cellular import chain, fan, layout, outputs, seq2seq, tree

OF = layout()
STOP = 9
both = pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "python"])


class Store:
    """Notes the constants of each request that is let in."""

    def __init__(self) -> None:
        self.loaded: list[tuple[list[int], Constants]] = []

    def load(self, starts: Sequence[int], constants: Constants) -> None:
        self.loaded.append((list(starts), constants))


def scheduler_of(compiled: bool, rows: int = 17, of=OF, **options: object) -> CellularScheduler:
    """Room for 16 rows of each bank, or as many as said."""
    return reference.scheduler_of(of, num_rows=[rows, rows], compiled=compiled, **options)


def run_all(scheduler: CellularScheduler, of=OF, word=lambda *_: 0) -> list[Finished[CellResult]]:
    done: list[Finished[CellResult]] = []
    while (batch := scheduler.next_batch(WorkerId(0), 0.0)) is not None:
        done += scheduler.complete(batch, outputs(batch, of, word=word), 7.0)
    return done


@both
def test_waiting_requests_are_admitted_by_arrival(compiled: bool):
    scheduler = scheduler_of(compiled)
    for name in "abcd":
        scheduler.add(chain(OF, name, 8), 0.0)  # two at a time
    scheduler.add(chain(OF, "small", 1), 0.0)  # there is room for it, but others came first
    admission = scheduler._admission
    assert (admission.num_waiting, admission.num_unfinished, scheduler.num_unfinished) == (3, 5, 5)
    assert list(admission.by_id) == ["a", "b"]
    assert scheduler.cancel("c", 0.0)[0].reason is FinishReason.CANCELLED
    assert not scheduler.cancel("c", 0.0), "it is gone"
    assert [each.request_id for each in run_all(scheduler)] == ["a", "b", "small", "d"]
    assert (admission.num_waiting, admission.num_unfinished) == (0, 0)


@both
def test_whoever_leaves_makes_room_once_its_cells_have_landed(compiled: bool):
    scheduler = scheduler_of(compiled)
    scheduler.add(chain(OF, "a", 16), 0.0)
    scheduler.add(chain(OF, "b", 16), 0.0)
    batch = scheduler.next_batch(WorkerId(0), 0.0)
    assert batch is not None
    scheduler.cancel("a", 0.0)
    assert scheduler._admission.num_waiting == 1, "a's cells are in flight"
    assert not scheduler.complete(batch, outputs(batch, OF), 0.0)
    while (batch := scheduler.next_batch(WorkerId(0), 0.0)) is not None:
        if scheduler.complete(batch, outputs(batch, OF), 0.0):
            break
        assert list(scheduler._admission.by_id) in (["b"], [])
    assert scheduler._admission.room.num_held == 0


@both
@pytest.mark.parametrize("bound", [0, 2])
def test_too_many_waiting_are_refused_with_a_time_to_try_again(compiled: bool, bound: int):
    scheduler = scheduler_of(compiled, config=SchedulerConfig(max_waiting=bound))
    for name in ("in", *"ab"[:bound]):
        scheduler.add(chain(OF, name, 16), 0.0)
    with pytest.raises(QueueFullError, match=f"^{bound} requests wait already") as caught:
        scheduler.add(chain(OF, "no", 16), 0.0)
    assert caught.value.retry_after_s == 1.0
    assert scheduler.num_unfinished == 1 + bound
    free = scheduler_of(compiled)
    for number in range(100):
        free.add(chain(OF, str(number), 16), 0.0)
    assert free._admission.num_waiting == 99


@both
def test_a_request_that_never_fits_is_refused_in_any_company(compiled: bool):
    scheduler = scheduler_of(compiled)
    scheduler.add(chain(OF, "exact", 16), 0.0)
    with pytest.raises(InvalidInputError, match=r"needs 17 rows of int64\[\] at once, more than the state pool has"):
        scheduler.add(chain(OF, "more", 17), 0.0)
    assert scheduler.num_unfinished == 1
    tiny = reference.scheduler_of(OF, num_rows=[0, 0], compiled=compiled)
    tiny.add(chain(OF, "one", 1), 0.0)  # a bank has a row besides that of zeros
    assert len(run_all(tiny)) == 1


@both
def test_constants_go_to_the_requests_own_rows(compiled: bool):
    store = Store()
    scheduler = scheduler_of(compiled, store=store)
    words = []
    for name in "abc":
        request = chain(OF, name, 8)
        words.append(request.constants)
        scheduler.add(request, 0.0)
    assert [constants for _, constants in store.loaded] == words[:2], "who waits has no rows yet"
    run_all(scheduler)
    assert [constants for _, constants in store.loaded] == words
    first = [starts[0] for starts, _ in store.loaded]
    assert all(start >= 1 for start in first), "row 0 is zeros"
    assert abs(first[0] - first[1]) >= 8
    assert all(len(starts) == len(OF.banks) for starts, _ in store.loaded)


@both
def test_leaving_early_takes_what_is_ready_along(compiled: bool):
    """Cancel a request with several cell types ready: none of its cells runs any more; all cells of others do."""
    scheduler = scheduler_of(compiled, 65, config=SchedulerConfig(max_tasks_to_submit=1))
    for name in ("a", "b"):
        scheduler.add(fan(OF, name, 2), 0.0)
    batch = scheduler.next_batch(WorkerId(0), 0.0)
    assert batch is not None
    scheduler.complete(batch, outputs(batch, OF), 0.0)  # the leaves: trees and chains are ready now
    assert sum(len(ready) > 0 for ready in scheduler._state.ready) == 2
    scheduler.cancel("a", 0.0)
    assert scheduler._admission.room.num_held == 1, "nothing of it was in flight"
    owners = {
        int(scheduler._state.tables.sub_request[scheduler._state.tables.node_fixed[node, 0]])
        for ready in scheduler._state.ready
        for node in ready.peek(len(ready))[0].tolist()
    }
    assert owners == {scheduler._admission.by_id["b"].index}
    assert [each.request_id for each in run_all(scheduler)] == ["b"]


@both
def test_whoever_has_nothing_in_flight_leaves_at_once_whatever_others_do(compiled: bool):
    scheduler = scheduler_of(compiled, 65, config=SchedulerConfig(max_tasks_to_submit=1))
    scheduler.add(chain(OF, "a", 2), 0.0)
    batch = scheduler.next_batch(WorkerId(0), 0.0)
    scheduler.add(fan(OF, "b", 2), 0.0)
    scheduler.add(fan(OF, "c", 2), 0.0)
    scheduler.cancel("b", 0.0)
    assert batch is not None
    assert scheduler._admission.room.num_held == 2
    assert not scheduler._admission.leaving
    scheduler.complete(batch, outputs(batch, OF), 0.0)
    assert [each.request_id for each in run_all(scheduler)] == ["a", "c"]
    calls = scheduler._state.calls
    if isinstance(calls, reference.Interpreted):
        assert not calls.more, "nothing is remembered of who has left"
        assert not calls.sub_more


def growing(of, name: str, parts: Sequence[CellRequest], seen: list[int], **fields: object) -> CellRequest:
    """The first of ``parts``, which goes on as the others; notes how many parts there are each time it is asked."""

    def grow(values):
        seen.append(len(values))
        if len(values) == len(parts):
            return None
        return parts[len(values)].plan, parts[len(values)].constants

    return CellRequest(name, parts[0].plan, parts[0].constants, grow=grow, **fields)  # type: ignore[arg-type]


@both
def test_a_growing_request_goes_on_until_it_says_so(compiled: bool):
    scheduler = scheduler_of(compiled)
    seen: list[int] = []
    parts = [chain(OF, "", 3), tree(OF, "", [0, 0]), chain(OF, "", 5)]
    scheduler.add(growing(OF, "a", parts, seen), 1.0)
    (done,) = run_all(scheduler)
    assert (done.request_id, done.reason, seen) == ("a", FinishReason.DONE, [1, 2, 3])
    assert done.result is not None
    assert len(done.result.values) == 3, "the results of all parts"
    assert done.result.num_cells == sum(part.plan.num_nodes for part in parts)
    assert (done.result.added_s, done.result.started_s, done.result.ended_s) == (1.0, 0.0, 7.0)
    assert scheduler._admission.room.num_held == 0


@both
def test_values_of_all_parts_stand_in_order(compiled: bool):
    scheduler = scheduler_of(compiled)
    said: list[list[list[int]]] = []
    parts = [seq2seq(OF, "", 1, 2), seq2seq(OF, "", 1, 3)]

    def grow(values):
        said.append([[int(word) for (word,) in part] for part in values])
        return (parts[1].plan, parts[1].constants) if len(values) == 1 else None

    scheduler.add(CellRequest("a", parts[0].plan, parts[0].constants, grow=grow), 0.0)
    words = iter([4, 5, 6, 7, 8])
    (done,) = run_all(scheduler, word=lambda *_: next(words))
    assert said == [[[4, 5]], [[4, 5], [6, 7, 8]]]
    assert [int(word) for (word,) in done.result.values] == [4, 5, 6, 7, 8]


@both
def test_a_growing_request_waits_before_all_others(compiled: bool):
    scheduler = scheduler_of(compiled)
    seen: list[int] = []
    scheduler.add(growing(OF, "a", [chain(OF, "", 4), chain(OF, "", 16)], seen), 1.0)
    scheduler.add(chain(OF, "b", 8), 2.0)
    scheduler.add(chain(OF, "c", 16), 3.0)
    done = run_all(scheduler)
    assert [each.request_id for each in done] == ["b", "a", "c"]
    assert [each.result.added_s for each in done] == [2.0, 1.0, 3.0]


@both
@pytest.mark.parametrize("fault", ["raises", "too large"])
def test_a_request_that_cannot_go_on_fails_alone(compiled: bool, fault: str):
    scheduler = scheduler_of(compiled)

    def grow(values):
        if fault == "raises":
            raise KeyError("no more")
        return chain(OF, "", 17).plan, chain(OF, "", 17).constants

    part = chain(OF, "", 2)
    scheduler.add(CellRequest("a", part.plan, part.constants, grow=grow), 0.0)
    scheduler.add(chain(OF, "b", 3), 0.0)
    done = {each.request_id: each for each in run_all(scheduler)}
    assert {name: each.reason for name, each in done.items()} == {"a": FinishReason.FAILED, "b": FinishReason.DONE}
    assert isinstance(done["a"].error, KeyError if fault == "raises" else InvalidInputError)
    assert scheduler.num_unfinished == 0
    assert scheduler._admission.room.num_held == 0


@both
def test_a_part_whose_chain_stopped_counts_up_to_the_stop(compiled: bool):
    of = layout(stop=STOP)
    scheduler = scheduler_of(compiled, of=of)
    seen: list[int] = []
    scheduler.add(growing(of, "a", [seq2seq(of, "", 1, 6), chain(of, "", 2)], seen), 0.0)
    (done,) = run_all(scheduler, of, word=lambda *_: STOP)
    assert done.result.num_cells == 2 + 2
    assert [np.shape(each[0]) for each in done.result.values] == [(), (2,)]
    assert scheduler._admission.room.num_held == 0, "also what ran in vain has landed"
    assert not scheduler._admission.leaving
