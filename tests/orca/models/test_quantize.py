import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.weights.quantize import Bits, quantize
from torch import Tensor


def weights(rows: int, columns: int, *, seed: int = 0, spread: float = 0.02) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * spread


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


shapes = st.tuples(st.integers(1, 5), st.integers(1, 4), st.sampled_from([16, 32]), st.integers(0, 99))


@given(shapes, st.sampled_from([1e-9, 1e-3, 1.0, 1e4, 1e9]))
def test_int8_is_wrong_by_half_a_step_at_most(shape: tuple[int, int, int, int], spread: float) -> None:
    rows, blocks, group_size, seed = shape
    matrix = weights(rows, blocks * group_size, seed=seed, spread=spread)
    packed = quantize(matrix, bits=8, group_size=group_size)
    assert (packed.shape, packed.bits, packed.group_size) == (tuple(matrix.shape), 8, group_size)
    largest = matrix.view(rows, blocks, group_size).abs().amax(dim=-1, keepdim=True)
    errors = (packed.dequantized() - matrix).view(rows, blocks, group_size).abs()
    # Half a step, and what rounding the scale to fp16 moves the largest value by.
    assert (errors <= largest * (0.5 / 127 + 2**-11) * (1 + 1e-5)).all()


@given(shapes, st.sampled_from([1e-9, 1e-3, 1.0, 1e4, 1e9]), st.sampled_from([0.0, -3.0]))
def test_int4_is_nearer_than_steps_over_the_groups_range(
    shape: tuple[int, int, int, int], spread: float, centre: float
) -> None:
    rows, blocks, group_size, seed = shape
    groups = (weights(rows, blocks * group_size, seed=seed, spread=1) + centre).view(-1, group_size) * spread
    low, high = torch.aminmax(groups, dim=1, keepdim=True)
    steps = (high - low) / 15
    range_error = (((groups - low) / steps).round() * steps + low - groups).norm()
    packed = quantize(groups.view(rows, -1), bits=4, group_size=group_size)
    assert (packed.shape, packed.bits, packed.group_size) == ((rows, blocks * group_size), 4, group_size)
    # The last term is the offset's rounding to fp16.
    assert (packed.dequantized().view_as(groups) - groups).norm() <= range_error * 1.01 + groups.norm() * 2**-11


@pytest.mark.parametrize(("bits", "expected"), [(8, 0.0054), (4, 0.0725)])
def test_errors_of_normal_weights(bits: Bits, expected: float) -> None:
    matrix = weights(256, 1024)
    assert relative_error(quantize(matrix, bits=bits).dequantized(), matrix) == pytest.approx(expected, rel=0.02)
    assert relative_error(quantize(matrix.bfloat16(), bits=bits).dequantized(), matrix) < expected * 1.1


@pytest.mark.parametrize(("bits", "bits_a_weight"), [(8, 8.5), (4, 5)])
def test_memory(bits: Bits, bits_a_weight: float) -> None:
    assert quantize(weights(8, 64), bits=bits).nbytes * 8 == bits_a_weight * 8 * 64


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [0.0, -0.25, 3.0])
def test_groups_of_one_value_keep_it(bits: Bits, value: float) -> None:
    matrix = torch.full((2, 32), value)
    assert torch.allclose(quantize(matrix, bits=bits).dequantized(), matrix, rtol=1e-3)


def test_values_that_codes_can_have_come_back_exactly() -> None:
    assert torch.equal(*[quantize(m := torch.arange(16.0).repeat(3, 2) - 4, bits=4).dequantized(), m])
    assert torch.equal(*[quantize(m := torch.arange(-127.0, 129)[None, :32] / 4, bits=8).dequantized(), m])


@pytest.mark.parametrize(("columns", "group_size"), [(48, 32), (20, 16), (64, 64), (64, 8)])
def test_groups_that_do_not_divide_a_row_are_refused(columns: int, group_size: int) -> None:
    with pytest.raises(InvalidInputError, match=rf"rows of {columns} features .* groups of {group_size}"):
        quantize(weights(2, columns), bits=8, group_size=group_size)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_only_numbers_are_accepted(bits: Bits, value: float) -> None:
    matrix = weights(4, 64)
    matrix[2, 40] = value
    with pytest.raises(InvalidInputError, match="infinite or no number"):
        quantize(matrix, bits=bits)
