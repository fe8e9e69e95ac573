"""Memory that forked processes share."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from mlsys_orca.model.kv_cache import shared_empty


@given(
    shape=st.lists(st.integers(min_value=0, max_value=4), max_size=4).map(tuple),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8]),
)
def test_every_shape_is_writable_also_those_without_elements(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = shared_empty(shape, dtype).fill_(1)

    assert torch.equal(made, torch.ones(shape, dtype=dtype))
