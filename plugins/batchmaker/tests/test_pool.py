"""The state pool: what is in rows that nobody has written, and in those that somebody has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mlsys_batchmaker.models.sequence import lstm_model
from mlsys_batchmaker.workers.pool import StatePool, plan_rows
from mlsys_core.errors import InvalidInputError

LAYOUT = lstm_model(num_words=5, hidden_size=6).layout  # words, and states of 6 numbers


def test_rows_are_zeros_until_written():
    pool = StatePool(LAYOUT, [70, 66])
    assert [(bank.dtype, tuple(bank.shape)) for bank in pool.banks] == [(torch.int64, (70,)), (torch.float32, (66, 6))]
    assert all(not bank.any() for bank in pool.banks)
    assert all(bank.data_ptr() % 64 == 0 for bank in pool.banks)
    pool.load([3, 64], [[np.array([4, 2])], [np.ones((2, 6), dtype=np.float32)]])
    assert pool.gather(0, torch.tensor([2, 3, 4, 5])).tolist() == [0, 4, 2, 0]
    assert pool.gather(1, torch.tensor([63, 64, 65])).sum(1).tolist() == [0, 6, 6]
    pool.scatter(1, torch.tensor([65]), torch.full((1, 6), 2.0))
    assert pool.banks[1].sum() == 18


def test_a_pool_of_too_few_bytes():
    assert plan_rows(LAYOUT, 4096) == [256, 85]
    with pytest.raises(InvalidInputError, match="has room for 21 rows"):
        plan_rows(LAYOUT, 1024)
