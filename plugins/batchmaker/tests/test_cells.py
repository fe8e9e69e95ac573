"""The LSTM cell against torch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_batchmaker.cells.lstm import LSTMCell
from mlsys_core.errors import InvalidInputError
from torch import nn


@settings(max_examples=25)
@given(
    batch=st.integers(1, 9),
    input_size=st.integers(1, 40),
    hidden_size=st.integers(1, 40),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_equal_to_torch(batch: int, input_size: int, hidden_size: int, bias: bool, dtype: torch.dtype):
    torch.manual_seed(batch + 10 * input_size + 1000 * hidden_size)
    reference = nn.LSTMCell(input_size, hidden_size, bias=bias, dtype=dtype)
    inputs, hidden, state = (torch.randn(batch, n, dtype=dtype) for n in (input_size, hidden_size, hidden_size))
    expected = reference(inputs, (hidden, state))
    got = LSTMCell.from_torch(reference)(inputs, hidden, state)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-14)


def test_equal_to_torch_at_the_papers_size():
    torch.manual_seed(0)
    reference = nn.LSTMCell(1024, 1024)
    inputs, hidden, state = torch.randn(3, 4, 1024).unbind()
    with torch.inference_mode():
        expected = reference(inputs, (hidden, state))
        got = LSTMCell.from_torch(reference)(inputs, hidden, state)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_rows_do_not_depend_on_their_batch():
    torch.manual_seed(0)
    cell = LSTMCell(5, 7).double()
    inputs, hidden, state = (torch.randn(6, n, dtype=torch.float64) for n in (5, 7, 7))
    together = cell(inputs, hidden, state)
    for row in range(6):
        alone = cell(inputs[row : row + 1], hidden[row : row + 1], state[row : row + 1])
        for whole, part in zip(together, alone, strict=True):
            torch.testing.assert_close(whole[row : row + 1], part, rtol=0, atol=1e-14)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 2)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int]):
    with pytest.raises(InvalidInputError, match="both must be at least 1"):
        LSTMCell(*sizes)
