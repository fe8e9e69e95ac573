"""Algorithm 2 of the ORCA paper: iteration-level FCFS, reservation, batches in flight; nothing lost or leaked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_core.serving import FinishReason, WorkerId
from mlsys_orca.model.kv_cache import BlockTables
from mlsys_orca.scheduling.batch import IterationBatch, IterationOutput, SampledToken
from mlsys_orca.scheduling.orca import IterationScheduler
from mlsys_orca.scheduling.request import GenerationRequest

WORKER = WorkerId(0)
EOS = 99


def request(name: str, prompt: int = 3, new: int = 4) -> GenerationRequest:
    return GenerationRequest(
        request_id=name, prompt_token_ids=tuple(range(prompt)), max_new_tokens=new, stop_token_ids=frozenset({EOS})
    )


def scheduler(
    num_blocks: int = 100, block_size: int = 1, max_batch_size: int = 8
) -> tuple[IterationScheduler, BlockTables]:
    tables = BlockTables(num_blocks=num_blocks, block_size=block_size)
    return IterationScheduler(tables, max_batch_size=max_batch_size, max_model_len=1000), tables


def output(batch: IterationBatch, token: int = 7) -> IterationOutput:
    return IterationOutput(tuple(SampledToken(part.request_id, token) for part in batch.sampled))


def ids(batch: IterationBatch | None) -> list[str]:
    return [part.request_id for part in batch.requests] if batch else []


def test_a_late_request_joins_at_the_next_iteration_and_an_early_one_leaves_at_once():
    s, _ = scheduler()
    s.add(request("x", new=3), 0)
    first = s.next_batch(WORKER, 0)
    s.add(request("y", new=1), 0)
    assert s.complete(first, output(first), 0) == []
    second = s.next_batch(WORKER, 0)
    assert ids(second) == ["x", "y"]
    assert second.token_ids == (7, 0, 1, 2)  # one decode token of x, then the prompt of y
    assert second.positions == (3, 0, 1, 2)
    (left,) = s.complete(second, output(second), 0)
    assert (left.request_id, left.reason, left.result.finish_reason) == ("y", FinishReason.DONE, "length")
    assert ids(s.next_batch(WORKER, 0)) == ["x"]


def test_a_stop_token_ends_the_answer_and_is_reported():
    s, tables = scheduler()
    s.add(request("x"), 0)
    batch = s.next_batch(WORKER, 0)
    (left,) = s.complete(batch, output(batch, EOS), 0)
    assert left.result.finish_reason == "stop"
    assert [token.token_id for token in left.result.tokens] == [EOS]
    assert tables.num_free_blocks == 100


def test_figure_6_three_batches_of_two_in_flight():
    """The paper's Figure 6: six requests, max batch size 2, three workers: AB, CD, EF, then AB again."""
    s, _ = scheduler(max_batch_size=2)
    for name in "ABCDEF":
        s.add(request(name), 0)
    flight = [s.next_batch(WORKER, 0) for _ in range(3)]
    assert [ids(batch) for batch in flight] == [["A", "B"], ["C", "D"], ["E", "F"]]
    assert s.next_batch(WORKER, 0) is None
    order = []
    for _ in range(3):
        batch = flight.pop(0)
        s.complete(batch, output(batch), 0)
        flight.append(s.next_batch(WORKER, 0))
        order.append(ids(flight[-1]))
    assert order == [["A", "B"], ["C", "D"], ["E", "F"]]


def test_a_request_that_does_not_fit_holds_back_later_smaller_ones():
    s, tables = scheduler(num_blocks=10)
    s.add(request("big", prompt=4, new=4), 0)
    s.add(request("bigger", prompt=5, new=4), 0)
    s.add(request("small", prompt=1, new=1), 0)
    assert ids(s.next_batch(WORKER, 0)) == ["big"]
    assert tables.num_free_blocks == 2
    assert s.next_batch(WORKER, 0) is None, "first come, first served: small must wait behind bigger"


@pytest.mark.parametrize(("prompt", "new"), [(0, 1), (1, 0), (8, 3), (11, 1)])
def test_a_request_that_can_never_run_is_refused_at_once(prompt: int, new: int):
    s, _ = scheduler(num_blocks=10)
    with pytest.raises(InvalidInputError, match=r"at least 1|at most 10"):
        s.add(request("x", prompt, new), 0)
    assert s.num_unfinished == 0


def test_an_id_in_use_is_refused():
    s, _ = scheduler()
    s.add(request("x"), 0)
    with pytest.raises(InvalidInputError, match="'x' is in use"):
        s.add(request("x"), 0)


def test_a_failed_iteration_fails_its_requests_only():
    s, tables = scheduler(max_batch_size=1)
    s.add(request("x"), 0)
    s.add(request("y"), 0)
    batch = s.next_batch(WORKER, 0)
    error = RuntimeError("device lost")
    (left,) = s.fail(batch, error, 0)
    assert (left.request_id, left.reason, left.error) == ("x", FinishReason.FAILED, error)
    assert ids(s.next_batch(WORKER, 0)) == ["y"]
    assert tables.num_free_blocks == 100 - 7


operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 6), st.integers(1, 5)),
        st.tuples(st.just("start")),
        st.tuples(st.just("complete"), st.booleans()),
        st.tuples(st.just("fail")),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
    ),
    max_size=60,
)


@given(operations, st.integers(6, 30), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_any_history_loses_nothing_and_leaks_nothing(script, num_blocks, block_size, max_batch_size, n_workers):
    s, tables = scheduler(num_blocks, block_size, max_batch_size)
    arrivals: list[str] = []
    tokens: dict[str, int] = {}
    left: dict[str, FinishReason] = {}
    flight: list[IterationBatch] = []

    def check(finished) -> None:
        for item in finished:
            assert item.request_id not in left, "a request left twice"
            left[item.request_id] = item.reason

    def start() -> None:
        if len(flight) == n_workers:
            return
        busy = {name for batch in flight for name in ids(batch)}
        batch = s.next_batch(WORKER, 0)
        if batch is None:
            return
        names = ids(batch)
        assert not busy & set(names), "a request is in two batches at once"
        assert len(names) <= max_batch_size
        assert names == sorted(names, key=arrivals.index), "first come, first served within a batch"
        # Iteration-level FCFS (section 4.2): an earlier request has run at least as many iterations as a later one,
        # unless it is in flight right now.
        waiting = [name for name in arrivals if name not in left and name not in busy]
        assert names == waiting[: len(names)]
        flight.append(batch)

    def complete(is_eos: bool) -> None:
        if flight:
            batch = flight.pop(0)
            for name in ids(batch):
                tokens[name] += 1
            check(s.complete(batch, output(batch, EOS if is_eos else 1), 0))

    for step in script:
        if step[0] == "add":
            name = f"r{len(arrivals)}"
            try:
                s.add(request(name, step[1], step[2]), 0)
            except InvalidInputError:
                assert step[1] + step[2] > num_blocks * block_size
                continue
            arrivals.append(name)
            tokens[name] = 0
        elif step[0] == "start":
            start()
        elif step[0] == "complete":
            complete(step[1])
        elif step[0] == "fail" and flight:
            check(s.fail(flight.pop(0), RuntimeError("x"), 0))
        elif step[0] == "cancel":
            check(s.cancel(f"r{step[1]}", 0))
    for _ in range(1000):  # drain: every request ends, whatever came before (no deadlock)
        start()
        if not flight:
            break
        complete(False)
    assert set(left) == set(arrivals)
    assert s.num_unfinished == 0
    assert tables.num_free_blocks == num_blocks
