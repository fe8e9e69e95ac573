"""Step messages: what a rank gets is what the master planned."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_orca.parallel import messages
from mlsys_orca.parallel.messages import (
    Done,
    Hello,
    Serve,
    Serving,
    batch_of,
    decode_to_master,
    decode_to_rank,
    step_of,
)
from mlsys_orca.scheduling.batch import BatchBuilder, IterationBatch, SamplingParams


@st.composite
def batches(draw: st.DrawFn) -> IterationBatch:
    """Iterations of requests with chunks and decodes."""
    builder = BatchBuilder()
    for index in range(draw(st.integers(1, 5))):
        computed = draw(st.integers(0, 2**17))
        tokens = draw(st.lists(st.integers(0, 2**20), min_size=1, max_size=9))
        builder.add(
            f"request {index}",
            tokens,
            num_computed_tokens=computed,
            block_table=tuple(draw(st.lists(st.integers(0, 2**20), max_size=9))),
            sampling=draw(st.sampled_from([None, SamplingParams()])),
        )
    for copy in draw(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=3)):
        builder.copy_block(*copy)
    return builder.build()


def facts(batch: IterationBatch) -> Any:
    """Everything that a model's forward reads of a batch."""
    return (
        batch.token_ids,
        batch.positions,
        batch.block_copies,
        [(part.start, part.stop, part.context_len, part.block_table) for part in batch.requests],
    )


@given(batches(), st.integers(0, 2**40), st.booleans())
def test_a_step_comes_back_as_the_batch_that_it_was(batch: IterationBatch, number: int, needs_logits: bool) -> None:
    wanted = [request.stop - 1 for request in batch.sampled]
    sent = step_of(number, batch, wanted=wanted, needs_logits=needs_logits)
    received = decode_to_rank(messages.encode(sent))
    assert received == sent
    assert facts(batch_of(received)) == facts(batch)
    assert list(received.wanted) == wanted


@pytest.mark.parametrize(
    "message", [Serve(3), Hello(1, 2, "0.1", "avx512", "abc", False, 9), Serving(), Done(7, 0.1, 0.2, True)]
)
def test_messages_come_back(message: Any) -> None:
    decode = decode_to_rank if isinstance(message, Serve) else decode_to_master
    assert decode(messages.encode(message)) == message


@given(st.binary(max_size=64))
def test_other_bytes_are_refused(payload: bytes) -> None:
    for decode in (decode_to_rank, decode_to_master):
        try:
            found = decode(payload)
        except (msgspec.DecodeError, msgspec.ValidationError):
            continue
        assert isinstance(found, messages.ToRank | messages.ToMaster)
