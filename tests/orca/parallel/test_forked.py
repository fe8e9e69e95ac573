"""Ranks in processes of their own: forked from one, they meet in shared memory, and none waits for a dead one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.orca.parallel.places import write_checkpoint

_BEGIN = """
import os, signal, sys, threading, time, torch
torch.set_num_threads(1)
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.model.kv_cache import shared_empty
from mlsys_orca.parallel.loading import load_shard
from mlsys_orca.parallel.placement import Placement
from mlsys_orca.parallel.shard import GroupBrokenError
from mlsys_orca.parallel.tensors.shared_memory import SharedReducer
from tests.orca.parallel.places import NUM_BLOCKS, run_whole, some_batches
path = sys.argv[1]
options = dict(dtype="fp32", weights="float")
batches = some_batches()
shards = [load_shard(path, Placement(rank=rank, num_ranks=2), **options) for rank in range(2)]
whole = shards[0].whole
memory = SharedReducer.create(whole, num_ranks=2)

def joined(rank, threads=1):
    reducer = SharedReducer(memory, whole, rank=rank, num_ranks=2)
    shard = shards[rank].join(reducer, num_threads=threads)
    return shard, shard.new_kv_cache(num_blocks=NUM_BLOCKS), reducer

def inputs_of(batch):
    return ForwardInputs(batch, block_size=16, device="cpu")
"""
_EQUAL = """
outs = [shared_empty((len(batch.sampled), whole.vocab_size), torch.float32) for batch in batches]
children = []
for rank in range(2):
    if not (child := os.fork()):
        shard, cache, _ = joined(rank, 2)
        for batch, out in zip(batches, outs):
            shard.run(inputs_of(batch), None, out, cache)
        os._exit(0)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
for out, answer in zip(outs, run_whole(path, batches, backend="native", **options)):
    assert torch.equal(out, answer.logits)
print("equal")
"""
_KILLED = """
ready = shared_empty((1,), torch.int64).zero_()
if not (child := os.fork()):
    shard, cache, _ = joined(1)
    while True:
        shard.run(inputs_of(batches[0]), None, None, cache)
        ready[0] += 1
shard, cache, mine = joined(0)

def watch():
    while ready[0] < 3:
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    mine.abort()

watcher = threading.Thread(target=watch)
watcher.start()
try:
    while True:
        shard.run(inputs_of(batches[0]), None, None, cache)
except GroupBrokenError as error:
    watcher.join()
    print(error)
"""


def run(code: str, path: Path) -> str:
    command = [sys.executable, "-c", _BEGIN + code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama-tied")


def test_forked_ranks_give_the_bits_of_one_process(path: Path) -> None:
    assert run(_EQUAL, path) == "equal"


def test_a_rank_whose_peer_was_killed_ends(path: Path) -> None:
    assert run(_KILLED, path) == "another rank of this stage is gone"
