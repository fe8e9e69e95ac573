"""Weights that several operators read are packed once."""

from __future__ import annotations

import pytest
import torch
from mlsys_nimble.backends.cpu.packing import pack_bias, pack_gemv, shared_weights


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
