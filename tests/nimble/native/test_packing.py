"""Weights that several operators read are packed once; tensors lie side by side in large pages."""

from __future__ import annotations

import pytest
import torch
from mlsys_nimble.backends.cpu import packing
from mlsys_nimble.backends.cpu.packing import ALIGNMENT, LEAST_NBYTES, LargePages, pack_bias, pack_gemv, shared_weights


def test_a_weight_is_packed_once_while_shared_and_anew_otherwise():
    weight = torch.randn(20, 12)
    with shared_weights():
        first = pack_gemv(weight, 8)
        assert pack_gemv(weight.view(20, 12), 8) is first
        assert pack_gemv(weight, 16) is not first
        assert pack_gemv(weight.T, 8) is not first
    assert pack_gemv(weight, 8) is not first


def test_a_temporary_weight_is_not_taken_for_the_next_one_in_its_place():
    with shared_weights():
        packed = [pack_bias(torch.full((5,), float(number)), 5, 1, 8) for number in range(20)]
    assert [bias[0, 0].item() for bias in packed] == list(range(20))


def test_sharing_ends_with_an_error():
    with pytest.raises(KeyError), shared_weights():
        raise KeyError
    weight = torch.randn(3, 3)
    assert pack_gemv(weight, 8) is not pack_gemv(weight, 8)


def test_tensors_come_to_lie_side_by_side_and_stay_what_they_are():
    large_pages = LargePages()
    tensors = [torch.randn(129, 257), torch.randn(40_001).to(torch.bfloat16), torch.randn(64, 1024)]
    placed = [large_pages.place(tensor) for tensor in tensors]
    for tensor, copy in zip(tensors, placed, strict=True):
        assert torch.equal(tensor, copy)
        assert copy.data_ptr() % ALIGNMENT == 0
    places = [copy.data_ptr() for copy in placed]
    ends = [place + copy.nbytes for place, copy in zip(places, placed, strict=True)]
    for place, end in zip(places[1:], ends, strict=False):
        assert 0 <= place - end < ALIGNMENT


def test_a_small_tensor_stays_where_it_is():
    small = torch.zeros(LEAST_NBYTES // 4 - 1)
    assert LargePages().place(small) is small


def test_a_tensor_larger_than_a_region_has_one_of_its_own(monkeypatch):
    monkeypatch.setattr(packing, "REGION_NBYTES", 1 << 20)
    large_pages = LargePages()
    first, large = torch.randn(200_000), torch.randn(1 << 20)
    assert torch.equal(large_pages.place(first), first)
    assert torch.equal(large_pages.place(large), large)


def test_a_region_outlives_who_made_it():
    placed = LargePages().place(torch.arange(100_000))
    other = [LargePages().place(torch.zeros(100_000, dtype=torch.int64)) for _ in range(8)]
    assert torch.equal(placed, torch.arange(100_000))
    assert all(not each.any() for each in other)
