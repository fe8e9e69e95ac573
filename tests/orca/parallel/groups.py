"""Groups of ranks in threads of this process, over parts that are cut by hand from a whole model."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from mlsys_orca.model.blocks import Decoder, Step
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.model.kv_cache import DEFAULT_BLOCK_SIZE, Empty, KVCache
from mlsys_orca.parallel.executor import ParallelExecutor, greet
from mlsys_orca.parallel.messages import Done, Hello
from mlsys_orca.parallel.placement import Placement
from mlsys_orca.parallel.rank import Rank
from mlsys_orca.parallel.tensors.ring import KvMemory
from mlsys_orca.parallel.wiring import GroupShape, Wiring
from torch import Tensor


@dataclass
class CutShard:
    """Some layers of a decoder that runs in torch's operators: a stage, without ranks."""

    decoder: Decoder
    placement: Placement
    nbytes: int = 0

    def __post_init__(self) -> None:
        self.config = self.whole = self.decoder.config
        self.needs_logits = self.config.logit_softcap is not None

    def new_kv_cache(self, *, num_blocks: int, dtype: str | None = None, empty: Empty | None = None) -> KVCache:
        """Return a cache of all layers, since these are numbered as in the whole model."""
        return KVCache(self.config, num_blocks=num_blocks, dtype=self.decoder.dtype, empty=empty)

    def join(self, reducer: Any, *, num_threads: int) -> Self:
        """Return this shard."""
        return self

    def run(self, inputs: ForwardInputs, states: Tensor | None, out: Tensor | None, kv_cache: Any) -> None:
        """See the protocol."""
        decoder = self.decoder
        rotary = decoder.rotary(inputs.positions) if decoder.rotary is not None else None
        x = decoder.embedding(inputs.token_ids, inputs.positions) if states is None else states
        for index in self.placement.layers(self.config):
            x = decoder.layers[index](x, Step(inputs, kv_cache, rotary))
        assert out is not None
        if not self.placement.is_last:
            out.copy_(x)
        elif len(inputs.sampled_rows):
            logits = decoder.logits(decoder.norm(x[inputs.sampled_rows]))
            if out.dtype == torch.float32:
                out.copy_(logits)
            else:
                largest = logits.max(dim=-1)
                out.copy_(torch.stack([largest.values.double(), largest.indices.double()], dim=-1))


def shape_of(
    config: ModelConfig,
    *,
    stages: int,
    in_flight: int,
    num_blocks: int = 64,
    ranks: int = 1,
    kv_dtype: str | None = None,
) -> GroupShape:
    max_tokens = num_blocks * DEFAULT_BLOCK_SIZE
    return GroupShape(
        tensor_parallel=ranks,
        pipeline_parallel=stages,
        max_in_flight=in_flight,
        max_tokens=max_tokens,
        max_rows=max_tokens,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_blocks=num_blocks,
        num_threads=1,
        kv_dtype=kv_dtype,
    )


def hello_of(place: Placement) -> Hello:
    return Hello(place.stage, place.rank, "0", "", "tiny", False, 0)


@contextmanager
def group_of(
    shards: Sequence[Any], shape: GroupShape, *, dones: list[Done] | None = None
) -> Iterator[ParallelExecutor]:
    """Run each shard as a rank in a thread; all have ended when the block ends."""
    wiring = Wiring.new(shape)
    failures: list[BaseException] = []

    def live(shard: Any, memory: KvMemory) -> None:
        place = shard.placement
        links = wiring.ranks[place].links(shape, place)
        rank = Rank(
            shard,
            links,
            lambda replica: shard.new_kv_cache(
                num_blocks=shape.num_blocks, dtype=shape.kv_dtype, empty=memory.take(replica)
            ),
            hello=hello_of(place),
        )
        try:
            rank.run()
        except BaseException as error:  # noqa: BLE001 - the test tells
            failures.append(error)
        finally:
            for channel in (links.up, links.down, *links.onward):
                assert channel is not None
                channel.close()

    memories = [KvMemory() for _ in shards]
    threads = [threading.Thread(target=live, args=pair) for pair in zip(shards, memories, strict=True)]
    for thread in threads:
        thread.start()
    links = wiring.links()
    greet(links, hello_of(shape.places[0]), timeout_s=60)
    executor = ParallelExecutor(
        links,
        max_in_flight=shape.max_in_flight,
        finds_largest=not any(shard.needs_logits for shard in shards),
        on_done=None if dones is None else dones.append,
    )
    try:
        executor.serve(0, timeout_s=60)
        yield executor
    finally:
        executor.close()
        for thread in threads:
            thread.join()
        for memory in memories:
            memory.close()
    assert not failures


@contextmanager
def stages_of(
    decoder: Decoder,
    *,
    stages: int,
    in_flight: int | None = None,
    num_blocks: int = 64,
    dones: list[Done] | None = None,
) -> Iterator[ParallelExecutor]:
    """Run a decoder cut into stages."""
    shards = [CutShard(decoder, Placement(stage=stage, num_stages=stages)) for stage in range(stages)]
    shape = shape_of(decoder.config, stages=stages, in_flight=in_flight or stages, num_blocks=num_blocks)
    with group_of(shards, shape, dones=dones) as executor:
        yield executor
