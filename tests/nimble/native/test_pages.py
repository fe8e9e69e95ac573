"""Tensors side by side in large pages."""

import torch
from mlsys_nimble.backends.cpu import packing
from mlsys_nimble.backends.cpu.packing import ALIGNMENT, LEAST_NBYTES, LargePages


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
