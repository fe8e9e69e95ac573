from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from mlsys_nimble.backends.recycle import Recycled
from torch import Tensor


@given(st.lists(st.tuples(st.sampled_from(["take", "drop", "view", "numpy"]), st.integers(0, 9)), max_size=40))
def test_no_two_that_are_alive_share_memory_and_what_is_dropped_is_used_again(acts: list[tuple[str, int]]):
    pool = Recycled((4, 2), (1, 4), torch.float32)
    alive: dict[int, object] = {}
    addresses: dict[int, int] = {}
    most = 0
    for number, (act, which) in enumerate(acts):
        if act == "drop":
            if which < len(alive):
                key = list(alive)[which]
                del alive[key], addresses[key]
            continue
        tensor = pool.take()
        assert tensor.stride() == (1, 4)
        assert tensor.data_ptr() not in addresses.values()
        addresses[number] = tensor.data_ptr()
        held: dict[str, Tensor | object] = {"take": tensor, "view": tensor[1:, :1], "numpy": tensor.numpy()[::2]}
        alive[number] = held[act]
        del tensor, held
        most = max(most, len(alive))
    assert pool.nbytes == 32 * most
