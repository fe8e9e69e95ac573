"""Blocks on demand: growth, preemption by recomputation, sharing, watermark; token ids say which position they are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import FinishReason, WorkerId
from mlsys_orca.scheduling.batch import GenerationRequest, IterationBatch, IterationOutput, SampledToken
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.paged import PagedScheduler

WORKER = WorkerId(0)


class Served:
    """A paged scheduler, and its batches in flight."""

    def __init__(self, num_blocks: int, block_size: int = 1, *, max_batch_size: int = 8, watermark: float = 0.0):
        self.tables = BlockTables(num_blocks=num_blocks, block_size=block_size)
        self.scheduler = PagedScheduler(
            self.tables, max_batch_size=max_batch_size, max_model_len=100, watermark=watermark
        )
        self.flight: list[IterationBatch] = []

    def add(self, name: str, prompt: Sequence[int], new: int = 9) -> None:
        self.scheduler.add(
            GenerationRequest(request_id=name, prompt_token_ids=tuple(prompt), max_new_tokens=new), now=0
        )

    def start(self) -> str:
        batch = self.scheduler.next_batch(WORKER, 0)
        if batch is None:
            return ""
        self.flight.append(batch)
        return "".join(part.request_id for part in batch.requests)

    def complete(self) -> list[str]:
        """Each token is 100 times its request's letter, plus its position."""
        batch = self.flight.pop(0)
        tokens = [
            SampledToken(part.request_id, 100 * ord(part.request_id) + part.context_len) for part in batch.sampled
        ]
        left = self.scheduler.complete(batch, IterationOutput(tuple(tokens)), 0)
        assert all(finished.reason is FinishReason.DONE for finished in left)
        return [finished.request_id for finished in left]

    def iterate(self) -> str:
        names = self.start()
        if names:
            self.complete()
        return names


def test_the_last_to_arrive_gives_its_blocks_and_comes_back_with_its_tokens():
    served = Served(8)
    for name in "abc":
        served.add(name, [ord(name), 2], new=5)
    assert served.iterate() == "abc"  # 6 blocks
    assert served.iterate() == "ab", "8 blocks, and c finds none: it was last"
    assert served.scheduler.pool.num_preemptions == 0, "c waits with its two blocks while nobody needs them"
    assert served.iterate() == "ab"
    assert served.scheduler.pool.num_preemptions == 1
    assert served.iterate() == "a", "b is the last with blocks now"
    assert [served.iterate() for _ in range(7)] == ["a", "bc", "b", "c", "c", "c", ""]
    assert served.scheduler.num_unfinished == 0
    assert served.tables.num_free_blocks == 8


def test_a_request_in_flight_keeps_its_blocks_and_an_earlier_one_gets_them_when_it_is_back():
    served = Served(9, max_batch_size=1)
    for name in "fed":
        served.add(name, [ord(name), 2], new=7)
    assert [served.start() for _ in range(3)] == ["f", "e", "d"]
    for name in "fed":  # each decodes once: 9 blocks
        served.complete()
        assert served.start() == name
    served.complete()
    assert served.start() == "", "f needs a block; e and d came after it, but are in flight"
    served.complete()
    assert served.start() == "f", "with a block of e, the last of those not in flight"
    assert served.scheduler.pool.num_preemptions == 1
    assert served.start() == "", "e must wait for d to come back, not d for e"
    served.complete()
    assert served.start() == "e", "with the blocks of d"
    assert served.scheduler.pool.num_preemptions == 2


def test_prompts_that_begin_alike_share_blocks_and_compute_the_rest():
    served = Served(8, block_size=4)
    served.add("a", range(10))
    served.iterate()
    served.add("b", [*range(8), 50])
    served.add("c", range(8))
    assert served.start() == "abc"
    batch = served.flight[0]
    assert [part.num_computed_tokens for part in batch.requests] == [10, 8, 7]
    assert [part.num_tokens for part in batch.requests] == [1, 1, 1]
    a, b, c = (part.block_table for part in batch.requests)
    assert a[:2] == b[:2]
    assert c[0] == a[0]
    assert batch.block_copies == ((a[1], c[1]),), "c is to write the last token of a block that a and b read"


@pytest.mark.parametrize("watermark", [-0.1, 1.0, float("nan")])
def test_an_impossible_watermark_is_refused(watermark: float):
    with pytest.raises(InvalidInputError, match="share of the K/V blocks"):
        Served(4, watermark=watermark)
