"""T5, experts and adapters through divided engines: each iteration has the bits that one process gives for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mlsys_core.loop import InlineExecutor
from mlsys_orca.backends.native.decoder import new_kv_cache
from mlsys_orca.backends.runner import Runner
from mlsys_orca.loading.load import load_model
from mlsys_orca.model.adapters import AdaptedDecoder, AdapterFiles
from mlsys_orca.parallel.loading import load_shard
from mlsys_orca.parallel.placement import all_places
from mlsys_orca.parallel.tensors.shared_memory import SharedReducer
from mlsys_orca.scheduling.request import GenerationRequest

from tests.orca.parallel.groups import group_of, shape_of
from tests.orca.parallel.loops import Run, requests_of
from tests.orca.parallel.replay import Recorded, SlicedModel, first_difference
from tests.orca.parallel.test_adapters import write_adapter

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_BLOCKS = 5  # few: requests are preempted
POLICIES = {"orca": 0, "paged": 3, "chunked": 2, "request-level": 0}  # with so many guesses
Adapters = Mapping[str, AdapterFiles]


def reference(path: Path, ranks: int, adapters: Adapters | None) -> tuple[Any, Any]:
    """One process whose sums have the shape of ``ranks`` ranks, and its empty cache."""
    if ranks > 1:
        sliced = SlicedModel(path, adapters=adapters, dtype="fp32", backend="torch")
        return sliced, sliced.new_kv_cache(num_blocks=NUM_BLOCKS)
    model: Any = load_model(path, dtype="fp32", backend="torch").model
    if adapters is not None:
        model = AdaptedDecoder(model, adapters)
    return model, new_kv_cache(model, num_blocks=NUM_BLOCKS)


def check(
    path: Path,
    policy: str,
    ranks: int,
    stages: int,
    requests: list[GenerationRequest],
    *,
    adapters: Adapters | None = None,
) -> Any:
    """See that each iteration has the bits of one process, and the run the tokens of one; return the scheduler."""
    places = all_places(tensor_parallel=ranks, pipeline_parallel=stages)
    options: dict[str, Any] = {"dtype": "fp32", "backend": "torch", "takes_adapters": adapters is not None}
    shards: list[Any] = [load_shard(path, place, **options) for place in places]
    whole = shards[0].whole
    memories = [SharedReducer.create(whole, num_ranks=ranks) for _ in range(stages)]
    joined = []
    for shard in shards:
        for key, files in (adapters or {}).items():
            shard.add_adapter(key, files)
        place = shard.placement
        reducer = SharedReducer(memories[place.stage], whole, rank=place.rank, num_ranks=ranks)
        joined.append(shard.join(reducer if ranks > 1 else None, num_threads=1))
    shape = shape_of(whole, stages=stages, in_flight=stages, num_blocks=NUM_BLOCKS, ranks=ranks)
    limits: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "drafts": POLICIES[policy], "most_tokens": 64}
    with group_of(joined, shape) as executor:
        recorded = Recorded(executor)
        run = Run(recorded, policy, **limits)
        tokens = run.tokens(requests)
        assert run.tables.num_free_blocks == NUM_BLOCKS
    model, cache = reference(path, ranks, adapters)
    assert first_difference(recorded.iterations, model, cache) is None
    runner = Runner(model, cache)
    assert tokens == Run(InlineExecutor(runner.run), policy, **limits).tokens(requests)
    return run.scheduler


@pytest.mark.parametrize(
    ("name", "policy", "ranks", "stages"),
    [
        ("t5", "paged", 2, 2),
        ("t5", "orca", 1, 2),
        ("flan", "chunked", 4, 1),
        ("t5", "request-level", 2, 1),
    ],
)
def test_encoder_decoders(checkpoints: Any, name: str, policy: str, ranks: int, stages: int) -> None:
    scheduler = check(checkpoints(name), policy, ranks, stages, requests_of(10, has_encoder=True))
    if policy == "paged":
        assert scheduler.pool.num_preemptions > 0
        assert scheduler.pool.num_guessed > 0


@pytest.mark.parametrize(("policy", "ranks", "stages"), [("chunked", 2, 2), ("paged", 1, 3)])
def test_adapters(checkpoints: Any, tmp_path: Path, policy: str, ranks: int, stages: int) -> None:
    files = {key: write_adapter(tmp_path / key, "llama-tied", seed) for seed, key in enumerate(("one", "two"))}
    requests = requests_of(10, adapters=("one", None, "two"))
    check(checkpoints("llama-tied"), policy, ranks, stages, requests, adapters=files)


def test_experts(checkpoints: Any) -> None:
    check(checkpoints("mixtral"), "chunked", 2, 2, requests_of(10))
