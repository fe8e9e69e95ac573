"""One rank's part in one group: it meets the others, and does what the master's messages say."""

from __future__ import annotations

import mmap
import os
from typing import Any

from mlsys_core.posix import forget_memory, named_memory
from mlsys_orca.parallel.channels import RankLinks
from mlsys_orca.parallel.placement import Placement
from mlsys_orca.parallel.rank import Rank
from mlsys_orca.parallel.ranks import ParallelModel
from mlsys_orca.parallel.shard import Shard
from mlsys_orca.parallel.tensors.ring import KvMemory
from mlsys_orca.parallel.tensors.shared_memory import SharedReducer

from mlsys_ray.ends import DistributedIn, DistributedOut, DistributedResultsOut
from mlsys_ray.messages import Joining
from mlsys_ray.sums import SumsCarrier, carriers_of, number_of
from mlsys_ray.tensors import TensorGroup, open_store


class Member:
    """A rank in a group. To be made, and called, in the thread that runs its steps.

    Args:
        place: The rank's.
        shard: Its part of the model.
        parts: The division.
        joining: How to meet the others.
        host: This machine's address.
        memory: Of its keys and values.

    Raises:
        GroupBrokenError: the others cannot be reached.
    """

    def __init__(
        self, place: Placement, shard: Shard, parts: ParallelModel, joining: Joining, *, host: str, memory: KvMemory
    ) -> None:
        shape, size = joining.shape, 1 + len(joining.shape.places)
        node = joining.nodes[number_of(place) - 1]
        shared = f"orca-{joining.group}-{place.stage}-{node}"  # a machine may have several nodes, for tests
        self._reducer = reducer = _open(shared, shard) if place.num_ranks > 1 else None
        try:
            store = open_store(joining.store[0], size, joining.store[1], is_master=False)
            tensors = TensorGroup(store, number_of(place), size, address=host)
        finally:
            forget_memory(shared)  # when all have met, all have opened it
        joined = shard.join(reducer, num_threads=shape.num_threads)
        if reducer is not None:
            _carry(place, reducer, tensors, joining.nodes)
        first, behind = 1 + (place.stage - 1) * place.num_ranks, 1 + (place.stage + 1) * place.num_ranks
        states_out = results = None
        if place.is_last:
            results = DistributedResultsOut(
                tensors,
                columns=place.vocabulary(shard.whole),
                vocab_size=shape.vocab_size,
                depth=shape.max_in_flight,
            )
        elif place.rank == 0:
            states_out = DistributedOut(
                tensors,
                hidden_size=shape.hidden_size,
                depth=shape.max_in_flight,
                receivers=range(behind, behind + place.num_ranks),
            )
        states_in = None if place.is_first else DistributedIn(tensors, hidden_size=shape.hidden_size, sender=first)

        def new_cache(_: int) -> Any:
            return joined.new_kv_cache(num_blocks=shape.num_blocks, dtype=shape.kv_dtype, empty=memory.take(0))

        self.rank = Rank(
            joined,
            RankLinks(states_in=states_in, states_out=states_out, results=results),
            new_cache,
            hello=parts.hello_of(shard),
            kv_identity=lambda _: memory.identity(0),
        )

    def abort(self) -> None:
        """Wake a step that waits for a sum, here and in ranks on this machine. Any thread may call it."""
        if self._reducer is not None:
            self._reducer.abort()


def _open(shared: str, shard: Shard) -> SharedReducer:
    """Return a view of the memory in which this machine's ranks of a stage meet; whoever comes first makes it."""
    place, whole = shard.placement, shard.whole
    nbytes = SharedReducer.nbytes_needed(whole, num_ranks=place.num_ranks)
    fd = named_memory(shared)
    try:
        os.ftruncate(fd, nbytes)
        return SharedReducer(mmap.mmap(fd, nbytes), whole, rank=place.rank, num_ranks=place.num_ranks)
    finally:
        os.close(fd)


def _carry(place: Placement, reducer: SharedReducer, tensors: TensorGroup, nodes: tuple[str, ...]) -> None:
    """Carry the stage's slots between machines, if this rank is its machine's first and there are others."""
    carriers = carriers_of(place, nodes)
    others = {rank: carrier for rank, carrier in carriers.items() if carrier != carriers[place.rank]}
    if others and carriers[place.rank] == place.rank:
        first = number_of(place) - place.rank
        local = [rank for rank in carriers if rank not in others]
        numbers = {rank: first + carrier for rank, carrier in others.items()}
        SumsCarrier(reducer, tensors, local=local, others=numbers).start()
