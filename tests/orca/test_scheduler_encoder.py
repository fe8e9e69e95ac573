"""Requests whose first tokens an encoder reads: at once, in one iteration, in blocks of their own."""

from __future__ import annotations

from typing import Any

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import WorkerId
from mlsys_orca.scheduling.batch import GenerationRequest, IterationBatch, IterationOutput, SampledToken
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.chunked import ChunkedScheduler
from mlsys_orca.scheduling.paged import PagedScheduler
from mlsys_orca.scheduling.request_level import RequestLevelScheduler

LIMITS = {"max_batch_size": 4, "max_model_len": 64}


def request(name: str, encoder: int, *, decoder: int = 1, new: int = 8) -> GenerationRequest:
    """Its prompt begins as everybody's."""
    prompt = (*range(100, 100 + encoder), *range(decoder))
    return GenerationRequest(request_id=name, prompt_token_ids=prompt, max_new_tokens=new, num_encoder_tokens=encoder)


def run(scheduler: Any) -> tuple[IterationBatch, dict[str, int]]:
    """One iteration: its batch, and how many tokens each request has in it."""
    batch = scheduler.next_batch(WorkerId(0), 0)
    output = IterationOutput(tuple(SampledToken(part.request_id, 50) for part in batch.sampled))
    scheduler.complete(batch, output, 0)
    return batch, {part.request_id: part.num_tokens for part in batch.requests}


def test_a_preempted_request_begins_anew_with_all_its_tokens() -> None:
    """Five blocks of four: a takes the last one and, for its 13th token, those of b, which has 9 tokens by then."""
    scheduler = PagedScheduler(BlockTables(num_blocks=5, block_size=4), **LIMITS, watermark=0.0)
    scheduler.add(request("a", 6, new=10), 0)
    scheduler.add(request("b", 6, new=3), 0)
    assert [run(scheduler)[1] for _ in range(3)] == [{"a": 7, "b": 7}, {"a": 1, "b": 1}, {"a": 1}]
    rows: dict[str, int] = {}
    while "b" not in rows:
        batch, rows = run(scheduler)
    assert scheduler.pool.num_preemptions == 1
    (part,) = (part for part in batch.requests if part.request_id == "b")
    assert (part.num_tokens, part.num_computed_tokens, part.num_encoder_tokens) == (6 + 1 + 2, 0, 6)


def test_chunks_leave_what_an_encoder_reads_whole() -> None:
    scheduler = ChunkedScheduler(BlockTables(num_blocks=40, block_size=2), **LIMITS, max_batch_tokens=8)
    scheduler.add(request("a", 4, decoder=6), 0)
    scheduler.add(request("b", 5), 0)
    assert run(scheduler)[1] == {"a": 8}, "a decoder's own prompt is cut"
    assert run(scheduler)[1] == {"a": 2, "b": 6}
    scheduler.add(request("c", 6), 0)
    assert run(scheduler)[1] == {"a": 1, "b": 1}, "seven tokens do not fit the six that are left"
    with pytest.raises(InvalidInputError, match="at most 8 tokens in an iteration"):
        scheduler.add(request("d", 8), 0)


def test_lockstep_counts_the_decoders_tokens() -> None:
    scheduler = RequestLevelScheduler(BlockTables(num_blocks=40, block_size=2), **LIMITS)
    scheduler.add(request("a", 9), 0)
    scheduler.add(request("b", 2, decoder=3), 0)
    assert run(scheduler)[1] == {"a": 10, "b": 3}
    assert run(scheduler)[1] == {"a": 1, "b": 1}


@pytest.mark.parametrize("num_encoder_tokens", [-1, 3, 4])
def test_a_decoder_must_have_something_to_begin_with(num_encoder_tokens: int) -> None:
    scheduler = PagedScheduler(BlockTables(num_blocks=20), **LIMITS)
    with pytest.raises(InvalidInputError, match="for the decoder to begin with"):
        scheduler.add(
            GenerationRequest(
                request_id="a",
                prompt_token_ids=(1, 2, 3),
                max_new_tokens=2,
                num_encoder_tokens=num_encoder_tokens,
            ),
            0,
        )
