"""What `serve` takes where nobody says: limits as `explain` prints them, dtypes by any of their names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.cli.options import _stated
from mlsys_orca.engine.fit import MAX_SUGGESTED, fit_of, suggested_batch_size
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.model.kv_cache import kv_nbytes_per_token

Make = Callable[..., Path]


@pytest.fixture
def loaded(make_gguf: Make) -> LoadedModel:
    return load_model(make_gguf(), dtype="fp32", backend="torch")


@pytest.mark.parametrize("num_requests", [2, 7, 1000])
def test_serve_takes_what_explain_prints(loaded: LoadedModel, num_requests: int) -> None:
    context = loaded.config.max_positions
    per_request = context * kv_nbytes_per_token(loaded.config, torch.float32)
    available: Any = {"available_nbytes": 4 * num_requests * per_request}  # a quarter is for keys and values
    taken = suggested_batch_size(loaded, {}, **available)
    assert taken == fit_of(loaded, tokens_per_request=1024, **available).max_batch_size
    assert taken == min(num_requests, MAX_SUGGESTED)
    assert suggested_batch_size(loaded, {"num_kv_tokens": 3 * context}, **available) == 3
    assert suggested_batch_size(loaded, {"num_kv_tokens": 64, "max_model_len": 32}, **available) == 2
    with pytest.raises(InvalidInputError, match="cannot hold one request"):
        suggested_batch_size(loaded, {}, available_nbytes=per_request)


@pytest.mark.parametrize(
    ("name", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("bf16", torch.bfloat16)]
)
def test_dtypes_go_by_their_whole_names(make_gguf: Make, name: str, dtype: torch.dtype) -> None:
    assert load_model(make_gguf(), dtype=name).model.dtype == dtype


def test_auto_is_what_suits_and_halves_are_refused(make_gguf: Make) -> None:
    path = make_gguf()
    assert load_model(path, dtype="auto").model.dtype == load_model(path).model.dtype
    assert (_stated("auto"), _stated(None), _stated("bf16")) == (None, None, "bf16")
    with pytest.raises(InvalidInputError, match="nothing here computes in float16"):
        load_model(path, dtype="float16")
    with pytest.raises(InvalidInputError, match="'fp8' is not known; fp32, bf16, float32, bfloat16 and auto are"):
        load_model(path, dtype="fp8")
