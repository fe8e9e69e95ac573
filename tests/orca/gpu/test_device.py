"""Checks that only a GPU can make: a model as users load it, and that its forward does not wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from mlsys_orca.backends.runner import Runner
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.model.kv_cache import KVCache
from mlsys_orca.scheduling.batch import BatchBuilder, IterationBatch, SamplingParams

pytestmark = pytest.mark.gpu
PROMPTS = {"a": [5], "b": list(range(40, 57)), "c": [9, 8, 7]}


def tokens_of(loaded: LoadedModel, num_iterations: int) -> dict[str, list[int]]:
    """Greedy answers of three requests, batched together."""
    device = loaded.model.device
    cache = KVCache(loaded.config, num_blocks=24, block_size=16, dtype=loaded.model.dtype, device=device)
    runner, tokens = Runner(loaded.model, cache), {name: list(prompt) for name, prompt in PROMPTS.items()}
    num_computed = dict.fromkeys(PROMPTS, 0)
    for _ in range(num_iterations):
        builder = BatchBuilder()
        for number, name in enumerate(PROMPTS):
            table = tuple(range(8 * number, 8 * number + 8))
            builder.add(
                name,
                tokens[name][num_computed[name] :],
                num_computed_tokens=num_computed[name],
                block_table=table,
                sampling=SamplingParams(),
            )
            num_computed[name] = len(tokens[name])
        for sampled in runner.run(builder.build()).sampled:
            tokens[sampled.request_id].append(sampled.token_id)
    return tokens


def test_answers_are_those_of_the_cpu(make_gguf: Callable[..., Path], device: torch.device) -> None:
    from mlsys_orca.backends.triton.decoder import FusedDecoder

    path = make_gguf()
    loaded = load_model(path, dtype="fp32", device=str(device))
    assert isinstance(loaded.model, FusedDecoder)
    assert tokens_of(loaded, 40) == tokens_of(load_model(path, dtype="fp32", backend="torch"), 40)


@pytest.fixture
def waits_are_errors() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_forward_waits_for_nothing(
    make_gguf: Callable[..., Path], device: torch.device, dtype: str, request: pytest.FixtureRequest
) -> None:
    loaded = load_model(make_gguf(), dtype=dtype, device=str(device))
    cache = KVCache(loaded.config, num_blocks=24, block_size=16, dtype=loaded.model.dtype, device=device)

    def run(batch: IterationBatch) -> None:
        loaded.model(ForwardInputs(batch, block_size=16, device=device), cache)

    def batch(lengths: list[int]) -> IterationBatch:
        builder = BatchBuilder()
        for number, length in enumerate(lengths):
            table = tuple(range(8 * number, 8 * number + 8))
            builder.add(str(number), [7] * length, num_computed_tokens=3, block_table=table, sampling=SamplingParams())
        return builder.build()

    with torch.inference_mode():
        run(batch([5, 1, 30]))  # compiles and tunes, which waits
        request.getfixturevalue("waits_are_errors")
        run(batch([1, 40]))
