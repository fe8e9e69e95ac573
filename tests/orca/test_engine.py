"""Number of keys and values for which an engine makes room."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_orca.engine.engine import Engine, EngineConfig, plan_kv_tokens
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.model.kv_cache import kv_nbytes_per_token


def test_a_full_batch_of_longest_requests_fits_in_whole_blocks(loaded: LoadedModel) -> None:
    config = EngineConfig(max_batch_size=8, max_model_len=33)
    tables = Engine(loaded, config, available_nbytes=2**30).block_tables
    for number in range(8):
        assert len(tables.reserve(str(number), 33)) == 3
    assert tables.num_free_blocks == 0


def test_memory_bounds_the_slots_and_too_little_is_refused(loaded: LoadedModel) -> None:
    per_token = kv_nbytes_per_token(loaded.config, loaded.model.dtype)
    config = EngineConfig(max_batch_size=8, max_model_len=64)
    assert plan_kv_tokens(loaded, config, available_nbytes=100 * 4 * per_token) == 100, "a quarter of the memory"
    with pytest.raises(InvalidInputError, match="50 K/V slots cannot hold one request of 64 tokens"):
        plan_kv_tokens(loaded, config, available_nbytes=50 * 4 * per_token)
    with pytest.raises(InvalidInputError, match=r"lower --max-model-len, or raise --kv-tokens$"):
        plan_kv_tokens(loaded, replace(config, num_kv_tokens=50), available_nbytes=100 * 4 * per_token)
