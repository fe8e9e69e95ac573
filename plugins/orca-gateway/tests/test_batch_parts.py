"""The pure parts of batches: states, records, room."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_orca_gateway.batches.lines import answer_line, line_identity, num_answers, seed_of
from mlsys_orca_gateway.batches.records import ENDED, MAX_YIELDS, Batch, KeptBatch, Load, may_start, to_yield
from mlsys_orca_gateway.batches.store import SCHEMA, BatchStore
from mlsys_orca_gateway.log import Log

STATES = ["validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled", "expired"]


def kept(status: str = "validating") -> KeptBatch:
    batch = Batch(id="batch_1", endpoint="/v1/completions", input_file_id="file-1", created_at=1, expires_at=2)
    return KeptBatch(batch=batch.model_copy(update={"status": status}), owner=None)


@given(st.lists(st.sampled_from(STATES), max_size=8))
def test_what_has_ended_stays_ended_and_each_step_has_its_time(steps: list[str]):
    state = kept()
    for time_s, status in enumerate(steps, 10):
        if state.batch.is_ended:
            with pytest.raises(ValueError, match="does not become"):
                state.moved(status, time_s)  # type: ignore[arg-type]
            continue
        try:
            state = state.moved(status, time_s)  # type: ignore[arg-type]
        except ValueError:
            continue
        assert getattr(state.batch, f"{status}_at") == time_s
        assert (state.batch.ended_at is not None) == (status in ENDED)


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.booleans(), st.binary(max_size=20)), max_size=6))
def test_the_next_store_has_the_batches_and_the_first_end_of_each_request(
    tmp_path_factory: pytest.TempPathFactory, ends: list[tuple[int, bool, bytes]]
):
    path = tmp_path_factory.mktemp("batches") / "log"

    async def write() -> None:
        with Log(path, SCHEMA) as log:
            store = BatchStore(log, keep_s=60)
            await store.create(kept())
            for index, failed, line in ends:
                await store.running["batch_1"].add_result(index, line, has_failed=failed)

    asyncio.run(write())
    first = {index: (failed, line) for index, failed, line in reversed(ends)}
    with Log(path, SCHEMA) as log:
        (running,) = BatchStore(log, keep_s=60).running.values()
        assert running.kept == kept()
        assert {index: (failed, running.line(index)) for index, failed in running.done.items()} == first


@given(
    num_at_once=st.integers(1, 8),
    events=st.lists(st.tuples(st.sampled_from(["client", "client leaves", "fill"]), st.integers(1, 12)), max_size=40),
)
def test_clients_never_wait_behind_what_may_still_yield(num_at_once: int, events: list[tuple[str, int]]):
    clients, running = 0, list[tuple[int, int]]()
    for kind, weight in events:
        if kind == "client":
            clients += 1
        elif kind == "client leaves":
            clients = max(0, clients - 1)
        else:
            load = Load(num_at_once, clients + sum(each for each, _ in running), sum(each for each, _ in running))
            if may_start(load, weight):
                assert clients + sum(each for each, _ in running) + weight <= num_at_once or not (clients or running)
                running.append((weight, weight % (MAX_YIELDS + 1)))
        of_batches = sum(each for each, _ in running)
        num = to_yield(Load(num_at_once, clients + of_batches, of_batches), running)
        running = running[: len(running) - num]
        is_full = clients + sum(each for each, _ in running) > num_at_once
        if is_full and clients and running:
            num_waiting = min(clients, clients + sum(each for each, _ in running) - num_at_once)
            assert running[-1][1] >= MAX_YIELDS or num_waiting == 0 or num > 0
        if not clients:
            assert num == 0


def test_what_a_line_draws_depends_on_the_batch_and_the_line_alone():
    drawn = {
        line_identity(batch, index, attempt, 5).key for batch in "ab" for index in range(3) for attempt in range(2)
    }
    assert len(drawn) == 12
    assert line_identity("a", 1, 0, 5) == line_identity("a", 1, 0, 5)
    assert line_identity("a", 1, 0, 5).seed == line_identity("a", 1, 1, 5).seed == seed_of("a", 1) != seed_of("a", 2)


@pytest.mark.parametrize(
    "body", [{"n": True}, {"n": -3}, {"n": "8"}, {"prompt": []}, {"prompt": [1, 2]}, {"prompt": None}]
)
def test_bodies_that_nobody_has_checked_have_a_weight(body: dict[str, object]):
    assert num_answers(body) == 1
    assert num_answers({"n": 10**30}) < 2**16


def test_an_answer_is_one_line_to_every_reader():
    line = answer_line("r", "a\u2028b", 200, '{"text": "a\u2028b\x85c\u2029"}'.encode())
    assert len(line.decode().splitlines()) == 1
