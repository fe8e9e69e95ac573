"""Operators of a tensor and a Python number: torch takes the number in the tensor's dtype first."""

import pytest
import torch
from mlsys_nimble import Nimble
from torch import nn

DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
NUMBERS = (True, 3, -1, 300, 16777217, 123456789, 2654435761, 2**40)
OPERATORS = (torch.add, torch.sub, torch.mul, torch.eq, torch.lt, torch.ge, torch.clamp_min, torch.clamp_max)


class Every(nn.Module):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def forward(self, x):
        return [function(x, number) for function, number in self.calls]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (4,)])
def test_numbers_are_taken_in_the_tensors_dtype(dtype, shape):
    x = torch.tensor([0, 1, 7, 100])[: shape[0] if shape else 1].reshape(shape).to(dtype)
    calls = []
    for function in OPERATORS:
        for number in NUMBERS:
            try:
                function(x, number)
            except (RuntimeError, NotImplementedError):
                continue
            calls.append((function, number))
    model = Every(calls)
    for call, got, wanted in zip(calls, Nimble(model).prepare(x)(x), model(x), strict=True):
        assert got.dtype == wanted.dtype, call
        assert torch.equal(got, wanted), (call, got, wanted)
