"""Algorithm 2 of the ORCA paper: iteration-level FCFS, reservation, batches in flight; nothing lost or leaked."""

from __future__ import annotations

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import FinishReason, WorkerId
from mlsys_orca.model.kv_cache import BlockTables
from mlsys_orca.scheduling.batch import GenerationRequest, IterationBatch, IterationOutput, SampledToken
from mlsys_orca.scheduling.orca import IterationScheduler

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
