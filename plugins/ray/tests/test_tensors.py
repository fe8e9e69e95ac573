"""Tensors between processes over gloo: they come whole and in order, and a lost process is an error and no hang."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing import get_context

import pytest
import torch
from mlsys_orca.model.slices import add_in_tree
from mlsys_orca.parallel.placement import Placement
from mlsys_orca.parallel.shard import GroupBrokenError
from mlsys_orca.parallel.tensors.shared_memory import SharedReducer
from mlsys_ray.ends import DistributedIn, DistributedOut, DistributedResultsIn, DistributedResultsOut, columns_of
from mlsys_ray.sums import SumsCarrier, carriers_of
from mlsys_ray.tensors import TensorGroup, open_store

from tests.orca.parallel.test_placement import config_of

HIDDEN, DEPTH = 8, 2
SIZES = [3, 1, 5, 2, 4]  # tokens of each iteration


def groups_of(size: int) -> list[TensorGroup]:
    """Processes of one group, in threads."""
    store = open_store("127.0.0.1", size, is_master=True)
    found: list[TensorGroup | None] = [None] * size

    def make(number: int) -> None:
        own = open_store("127.0.0.1", size, store.port, is_master=False)
        found[number] = TensorGroup(own, number, size, address="127.0.0.1")

    threads = [threading.Thread(target=make, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [group for group in found if group is not None]


def states_of(number: int) -> torch.Tensor:
    return torch.randn(SIZES[number], HIDDEN, generator=torch.Generator().manual_seed(number))


def first_stage(port: int) -> None:
    group = TensorGroup(open_store("127.0.0.1", 2, port, is_master=False), 0, 2, address="127.0.0.1")
    out = DistributedOut(group, hidden_size=HIDDEN, depth=DEPTH, receivers=[1])
    for number in range(len(SIZES)):
        out.room(number, SIZES[number]).copy_(states_of(number))
        out.send(number)
    threading.Event().wait()


def test_states_come_in_order_and_a_lost_stage_is_an_error() -> None:
    store = open_store("127.0.0.1", 2, is_master=True)
    stage = get_context("spawn").Process(target=first_stage, args=(store.port,), daemon=True)
    stage.start()
    try:
        receiver = DistributedIn(TensorGroup(store, 1, 2, address="127.0.0.1"), hidden_size=HIDDEN, sender=0)
        for number, size in enumerate(SIZES):
            assert torch.equal(receiver.receive(number, size), states_of(number))
        assert stage.pid is not None
        os.kill(stage.pid, signal.SIGKILL)
        with pytest.raises(GroupBrokenError, match="a process of the group is gone"):
            receiver.receive(len(SIZES), 1)
    finally:
        stage.kill()
        stage.join()


def test_results_of_ranks_are_put_beside_each_other() -> None:
    vocab, groups = 11, groups_of(4)
    logits = [torch.randn(rows, vocab) for rows in SIZES]
    results = DistributedResultsIn(groups[0], ranks=range(1, 4), vocab_size=vocab)
    outs = []
    for rank in range(3):
        columns = columns_of(rank, 3, vocab)
        outs.append(DistributedResultsOut(groups[1 + rank], columns=columns, vocab_size=vocab, depth=DEPTH))
    for number, whole in enumerate(logits):
        for rank, out in enumerate(outs):
            own = columns_of(rank, 3, vocab)
            out.logits(number, len(whole))[:, own.start : own.stop] = whole[:, own.start : own.stop]
            out.send(number)
        assert torch.equal(results.logits(number, len(whole)), whole)
        for rank, out in enumerate(outs):
            out.peaks(number, 2).copy_(torch.tensor([[rank, 1.0], [rank, 2.0]]))
            out.send(number)
        assert results.peaks(number, 2)[:, 1].tolist() == [[0, 2], [1, 2], [2, 2]]
    assert results.logits(9, 0).shape == (0, vocab)  # an iteration of prompts' beginnings: nothing is sent
    assert results.peaks(9, 0).shape == (3, 0, 2)


@pytest.mark.parametrize("hosts", [[0, 1], [0, 1, 2], [0, 0, 1, 1], [0, 1, 1, 1]])
def test_sums_over_hosts_have_the_bits_of_one_memory(hosts: list[int]) -> None:
    config, ranks = config_of(head_dim=2), len(hosts)
    groups = groups_of(1 + ranks)
    memories = {host: SharedReducer.create(config, num_ranks=ranks) for host in set(hosts)}
    reducers = [SharedReducer(memories[host], config, rank=rank, num_ranks=ranks) for rank, host in enumerate(hosts)]
    for host in set(hosts):
        local = [rank for rank in range(ranks) if hosts[rank] == host]
        others = {rank: 1 + hosts.index(hosts[rank]) for rank in range(ranks) if hosts[rank] != host}
        SumsCarrier(reducers[local[0]], groups[1 + local[0]], local=local, others=others).start()
    slot = reducers[0].slot_size
    sizes = [1, 300, slot, slot + 5, 3 * slot, 17, 1]  # more than a slot is exchanged in pieces
    found: list[list[torch.Tensor]] = [[] for _ in hosts]

    def parts(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return [torch.randn(size, generator=generator) for size in sizes]

    def run(rank: int) -> None:
        for part in parts(rank):
            found[rank].append(add_in_tree(reducers[rank].exchange(part), torch.add).clone())

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [add_in_tree(list(each), torch.add) for each in zip(*map(parts, range(ranks)), strict=True)]
    for rank in range(ranks):
        assert all(torch.equal(got, want) for got, want in zip(found[rank], expected, strict=True))
    for reducer in reducers:
        reducer.abort()


def test_an_aborted_carrier_ends_the_runs_of_its_host() -> None:
    config, groups = config_of(head_dim=2), groups_of(3)
    memory = SharedReducer.create(config, num_ranks=2)
    reducer = SharedReducer(memory, config, rank=0, num_ranks=2)
    carrier = SumsCarrier(reducer, groups[1], local=[0], others={1: 2})
    carrier.start()
    threading.Timer(0.05, reducer.abort).start()
    with pytest.raises(GroupBrokenError):
        reducer.exchange(torch.ones(4))  # rank 1 never comes


def test_the_first_rank_of_each_node_carries_for_its_stage() -> None:
    place = Placement(stage=1, num_stages=2, rank=2, num_ranks=3)
    assert carriers_of(place, (0, 0, 0, 5, 6, 6)) == {0: 0, 1: 1, 2: 1}
