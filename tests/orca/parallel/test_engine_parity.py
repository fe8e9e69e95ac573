"""Ranks and stages under every policy: the tokens and log-probabilities of one process, to the bit."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mlsys_core.loop import InlineExecutor
from mlsys_orca.backends.native.decoder import new_kv_cache
from mlsys_orca.backends.runner import Runner
from mlsys_orca.loading.load import load_model
from mlsys_orca.parallel.loading import load_shard
from mlsys_orca.parallel.placement import all_places
from mlsys_orca.parallel.tensors.shared_memory import SharedReducer

from tests.orca.parallel.groups import group_of, shape_of
from tests.orca.parallel.loops import Run, requests_of

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_BLOCKS = 5  # few: requests are preempted
POLICIES = {"orca": 0, "paged": 3, "chunked": 2, "request-level": 0}  # with so many guesses


@cache
def answers_of_one(path: Path, policy: str, *, exactly: bool, kv_dtype: str | None, **options: Any) -> Any:
    """By one process."""
    model = load_model(path, **options).model
    runner = Runner(model, new_kv_cache(model, num_blocks=NUM_BLOCKS, dtype=kv_dtype))
    return Run(InlineExecutor(runner.run), policy, num_blocks=NUM_BLOCKS).tokens(requests_of(14), exactly=exactly)


def check(
    path: Path,
    policy: str,
    ranks: int,
    stages: int,
    *,
    exactly: bool = True,
    kv_dtype: str | None = None,
    **options: Any,
) -> None:
    """See that so many ranks of so many stages answer as one process, and leave every block free."""
    expected = answers_of_one(path, policy, exactly=exactly, kv_dtype=kv_dtype, **options)
    shards = [
        load_shard(path, place, **options) for place in all_places(tensor_parallel=ranks, pipeline_parallel=stages)
    ]
    whole = shards[0].whole
    memories = [SharedReducer.create(whole, num_ranks=ranks) for _ in range(stages)]
    joined = []
    for shard in shards:
        place = shard.placement
        reducer = SharedReducer(memories[place.stage], whole, rank=place.rank, num_ranks=ranks)
        joined.append(shard.join(reducer if ranks > 1 else None, num_threads=1))
    shape = shape_of(whole, stages=stages, in_flight=stages, num_blocks=NUM_BLOCKS, ranks=ranks, kv_dtype=kv_dtype)
    with group_of(joined, shape) as executor:
        run = Run(executor, policy, num_blocks=NUM_BLOCKS, drafts=POLICIES[policy])
        assert run.tokens(requests_of(14), exactly=exactly) == expected
        assert run.tables.num_free_blocks == NUM_BLOCKS


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (4, 1), (1, 2), (1, 3), (2, 2)])
def test_degrees_under_every_policy(checkpoints: Any, policy: str, ranks: int, stages: int) -> None:
    check(checkpoints("llama"), policy, ranks, stages, dtype="fp32", weights="float")


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "int8"])
def test_each_dtype_of_keys_and_values(checkpoints: Any, kv_dtype: str) -> None:
    check(checkpoints("llama"), "chunked", 2, 2, kv_dtype=kv_dtype, dtype="fp32", weights="float")


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "gemma2"])
@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (2, 2), (1, 3)])
def test_families(checkpoints: Any, name: str, ranks: int, stages: int) -> None:
    check(checkpoints(name), "chunked", ranks, stages, dtype="bf16", weights="int8")


@pytest.mark.parametrize(("ranks", "stages"), [(1, 3), (3, 2)])
def test_smollm2(smollm2_path: Path, ranks: int, stages: int) -> None:
    check(smollm2_path, "chunked", ranks, stages)
