import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.weights.quantized import QuantizedMatrix, concatenate_rows
from torch import Tensor


def random_matrix(
    rows: int = 6,
    columns: int = 64,
    *,
    bits: int = 8,
    group_size: int = 32,
    dtype: torch.dtype = torch.float32,
    has_offsets: bool = True,
    seed: int = 0,
) -> QuantizedMatrix:
    generator = torch.Generator().manual_seed(seed)
    low, high, kind, width = (-128, 128, torch.int8, columns) if bits == 8 else (0, 256, torch.uint8, columns // 2)
    groups = (rows, columns // group_size)
    return QuantizedMatrix(
        codes=torch.randint(low, high, (rows, width), dtype=kind, generator=generator),
        scales=torch.randn(groups, generator=generator).to(dtype),
        offsets=torch.randn(groups, generator=generator).to(dtype) if has_offsets else None,
    )


def one_by_one(matrix: QuantizedMatrix) -> Tensor:
    """The rule of the module's docstring, value by value."""
    out = torch.empty(matrix.shape)
    for row in range(matrix.out_features):
        for column in range(matrix.in_features):
            group = column // matrix.group_size
            if matrix.bits == 8:
                code = matrix.codes[row, column]
            else:
                code = matrix.codes[row, column // 2] >> (4 * (column % 2)) & 15
            value = matrix.scales[row, group].float() * code.float()
            out[row, column] = value if matrix.offsets is None else value + matrix.offsets[row, group].float()
    return out


kinds = st.fixed_dictionaries(
    {
        "bits": st.sampled_from([4, 8]),
        "group_size": st.sampled_from([16, 32]),
        "dtype": st.sampled_from([torch.float16, torch.float32]),
        "has_offsets": st.booleans(),
    }
)


@given(kinds, st.integers(1, 3), st.integers(1, 3), st.integers(0, 9))
def test_values_follow_the_rule_to_the_bit(kind: dict, rows: int, blocks: int, seed: int) -> None:
    matrix = random_matrix(rows, 32 * blocks, seed=seed, **kind)
    assert (matrix.shape, matrix.bits, matrix.group_size) == ((rows, 32 * blocks), kind["bits"], kind["group_size"])
    assert torch.equal(matrix.dequantized(), one_by_one(matrix))
    assert torch.equal(matrix.dequantized(torch.bfloat16), one_by_one(matrix).bfloat16())


@given(st.lists(kinds, min_size=1, max_size=4), st.integers(1, 2))
def test_rows_of_any_kinds_join_with_every_value_as_it_was(pieces: list[dict], blocks: int) -> None:
    matrices = [random_matrix(1 + i, 32 * blocks, seed=i, **kind) for i, kind in enumerate(pieces)]
    joined = concatenate_rows(matrices)
    assert torch.equal(joined.dequantized(), torch.cat([matrix.dequantized() for matrix in matrices]))
    if all(kind == pieces[0] for kind in pieces):  # nothing was widened
        assert joined.nbytes == sum(matrix.nbytes for matrix in matrices)


@given(kinds)
def test_rows_are_taken_and_moved_without_touching_their_values(kind: dict) -> None:
    matrix = random_matrix(6, 64, **kind)
    values = matrix.dequantized()
    order = torch.tensor([5, 0, 0, 3])
    assert torch.equal(matrix.rows(order).dequantized(), values[order])
    assert torch.equal(matrix.rows(slice(2, 4)).dequantized(), values[2:4])
    assert matrix.rows(slice(2, 4)).codes.data_ptr() == matrix.codes[2:].data_ptr()
    assert torch.equal(matrix.map(lambda part: part.flip(0)).dequantized(), values.flip(0))


def test_memory_is_that_of_the_parts() -> None:
    assert random_matrix(4, 64, bits=8, dtype=torch.float16, has_offsets=False).nbytes == 4 * (64 + 2 * 2)
    assert random_matrix(4, 64, bits=4, dtype=torch.float32, group_size=16).nbytes == 4 * (32 + 2 * 4 * 4)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"codes": torch.zeros(2, 64)}, "codes are int8"),
        ({"scales": torch.zeros(2, 2, dtype=torch.bfloat16)}, "scales fp16 or fp32"),
        ({"scales": torch.zeros(3, 2)}, "differ in their rows"),
        ({"scales": torch.zeros(2, 1)}, "groups are of 16 or of 32"),
        ({"scales": torch.zeros(2, 3)}, "groups are of 16 or of 32"),
        ({"offsets": torch.zeros(2, 4)}, "not like scales"),
        ({"offsets": torch.zeros(2, 2, dtype=torch.float16)}, "not like scales"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts: dict[str, Tensor], message: str) -> None:
    fitting = {"codes": torch.zeros(2, 64, dtype=torch.int8), "scales": torch.zeros(2, 2), "offsets": None}
    with pytest.raises(InvalidInputError, match=message):
        QuantizedMatrix(**(fitting | parts))
