from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_open_inference.tensors import (
    conformed,
    from_elements,
    from_numbers,
    from_raw,
    from_values,
    to_raw,
    to_values,
)
from mlsys_serving.models import DataType

NUMBERS = [datatype for datatype in DataType if datatype not in (DataType.BYTES, DataType.BF16)]


@given(data=st.data(), datatype=st.sampled_from(NUMBERS))
def test_numbers_survive_raw_bytes(data: Any, datatype: DataType) -> None:
    array = data.draw(npst.arrays(datatype.dtype, npst.array_shapes(min_dims=0, max_dims=3, min_side=0)))
    back = from_raw(memoryview(bytes(to_raw(array, datatype))), datatype, array.shape, what="x")
    assert back.dtype == datatype.dtype
    np.testing.assert_array_equal(back, array)


@given(elements=st.lists(st.binary(max_size=20), max_size=6))
def test_bytes_survive_raw_bytes(elements: list[bytes]) -> None:
    array = from_elements(elements, [len(elements)], what="x")
    back = from_raw(memoryview(bytes(to_raw(array, DataType.BYTES))), DataType.BYTES, [len(elements)], what="x")
    assert back.tolist() == elements


@given(npst.arrays(np.float32, st.integers(0, 20)))
def test_bf16_is_rounded_as_ml_dtypes_does(array: Any) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        expected = array.astype(ml_dtypes.bfloat16)
    back = from_raw(memoryview(bytes(to_raw(array, DataType.BF16))), DataType.BF16, array.shape, what="x")
    np.testing.assert_array_equal(back, expected.astype(np.float32))


@pytest.mark.parametrize(
    ("bits", "narrowed"),
    [
        (0x3F808000, 0x3F80),  # half way between two: the even one
        (0x3F818000, 0x3F82),
        (0x3F808001, 0x3F81),
        (0x3F817FFF, 0x3F81),
        (0xBF818000, 0xBF82),
        (0x7F7FFFFF, 0x7F80),  # too large: infinity
        (0xFF800000, 0xFF80),
        (0x80000000, 0x8000),
        (0x00008000, 0x0000),
        (0x7F800001, 0x7FC0),  # NaN whose upper bits are those of infinity
        (0xFFC10000, 0xFFC1),
    ],
    ids=hex,
)
def test_bf16_on_both_sides_of_a_tie(bits: int, narrowed: int) -> None:
    array = np.array([bits], np.uint32).view(np.float32)
    assert bytes(to_raw(array, DataType.BF16)) == narrowed.to_bytes(2, "little")
    widened = np.array([narrowed << 16], np.uint32).view(np.float32)
    if np.isfinite(widened).all():
        assert to_values(array, DataType.BF16, what="y") == widened.tolist()
    else:
        with pytest.raises(InvalidInputError, match="y holds NaN or infinity"):
            to_values(array, DataType.BF16, what="y")


def test_raw_outputs_are_views_where_they_are_large_and_contiguous() -> None:
    for size in (1023, 1024, 5000):
        array = np.arange(size, dtype=np.int32)
        raw = to_raw(array, DataType.INT32)
        assert (len(raw), bytes(raw)) == (array.nbytes, array.tobytes())
        assert isinstance(raw, memoryview) == (array.nbytes >= 4096)


def test_raw_numbers_are_a_read_only_view() -> None:
    raw = np.arange(6, dtype=np.float32).tobytes()
    array = from_raw(memoryview(raw), DataType.FP32, [2, 3], what="x")
    assert not array.flags.writeable
    assert not array.flags.owndata
    assert np.shares_memory(array, np.frombuffer(raw, np.uint8))


def test_raw_outputs_that_are_not_contiguous_come_out_row_major() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3).T
    assert bytes(to_raw(array, DataType.INT32)) == np.ascontiguousarray(array).tobytes()
    large = np.arange(4096, dtype=np.int32).reshape(64, 64).T
    assert bytes(to_raw(large, DataType.INT32)) == np.ascontiguousarray(large).tobytes()


@pytest.mark.parametrize(
    ("raw", "datatype", "shape", "message"),
    [
        (b"\0" * 7, DataType.FP32, [2], "x has 7 bytes of data, but FP32 of shape [2] takes 8"),
        (b"\0" * 9, DataType.FP32, [2], "x has 9 bytes"),
        (b"\2", DataType.BOOL, [1], "other than 0 and 1"),
        (b"\3\0\0\0ab", DataType.BYTES, [1], "ends within element 0 of 1"),
        (b"\0\0", DataType.BYTES, [1], "too short for 1 elements"),
        (b"\1\0\0\0a\0\0\0", DataType.BYTES, [2], "ends within the length of element 1"),
        (b"\0\0\0\0\0", DataType.BYTES, [1], "1 bytes after its 1 elements"),
        (b"", DataType.BYTES, [10**12], "too short for"),
        (b"", DataType.FP32, [10**12, 10**12], "has 0 bytes"),
    ],
    ids=str,
)
def test_raw_bytes_that_do_not_add_up_are_refused(
    raw: bytes, datatype: DataType, shape: list[int], message: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        from_raw(memoryview(raw), datatype, shape, what="x")
    assert message in str(caught.value)


@given(data=st.data(), datatype=st.sampled_from([*NUMBERS, DataType.BF16]))
def test_numbers_survive_json(data: Any, datatype: DataType) -> None:
    shape = data.draw(npst.array_shapes(min_dims=1, max_dims=3, min_side=0))
    finite: Any = {"allow_nan": False, "allow_infinity": False} if datatype.is_floating else {}
    if datatype is DataType.BF16:
        elements: Any = st.floats(width=16, **finite)
    else:
        elements = npst.from_dtype(datatype.dtype, **finite)
    array = data.draw(npst.arrays(datatype.dtype, shape, elements=elements))
    if datatype is DataType.BF16:
        array = from_raw(memoryview(bytes(to_raw(array, datatype))), datatype, shape, what="x")
    np.testing.assert_array_equal(from_values(to_values(array, datatype, what="x"), datatype, shape, what="x"), array)
    if array.size:  # nested, too; without elements JSON cannot tell the shape
        np.testing.assert_array_equal(from_values(array.tolist(), datatype, shape, what="x"), array)


def test_texts_keep_their_trailing_nulls() -> None:
    array = from_values([["ä\0", ""], ["b", "c"]], DataType.BYTES, [2, 2], what="x")
    assert array.tolist() == [["ä\0".encode(), b""], [b"b", b"c"]]
    assert to_values(array, DataType.BYTES, what="x") == ["ä\0", "", "b", "c"]


@pytest.mark.parametrize("shape", [[6], [2, 3], [3, 2], [3, 1, 2], [2, 3, 1], [1, 1, 6], [0]], ids=str)
def test_texts_are_nested_as_their_shape_says(shape: list[int]) -> None:
    texts = np.array([f"text {n}" for n in range(int(np.prod(shape)))], np.object_).reshape(shape)
    array = from_values(texts.tolist(), DataType.BYTES, shape, what="x")
    assert (list(array.shape), array.ravel().tolist()) == (shape, [text.encode() for text in texts.ravel()])
    assert from_values(texts.ravel().tolist(), DataType.BYTES, shape, what="x").tolist() == array.tolist()  # or flat
    for other in ([1, *shape], [*shape, 1]):
        if len(shape) > 1:
            with pytest.raises(InvalidInputError, match="x: 'data' is nested as"):
                from_values(texts.tolist(), DataType.BYTES, other, what="x")


@pytest.mark.parametrize(
    ("values", "datatype", "shape", "message"),
    [
        ([1.5], DataType.INT32, [1], "not all INT32"),
        ([300], DataType.UINT8, [1], "out of the range of UINT8"),
        ([-1], DataType.UINT64, [1], "out of the range of UINT64"),
        ([2**64], DataType.UINT64, [1], "not all UINT64"),
        (["1"], DataType.INT32, [1], "not all INT32"),
        ([None], DataType.FP32, [1], "not all FP32"),
        ([True], DataType.FP32, [1], "not all FP32"),
        ([1, True], DataType.INT32, [2], "not all INT32"),
        ([False, 0.5], DataType.FP32, [2], "not all FP32"),
        ([[2], [True]], DataType.UINT64, [2, 1], "not all UINT64"),
        ([1], DataType.BOOL, [1], "not all BOOL"),
        ([1, 2, 3], DataType.FP32, [2], "x has 3 elements of data, but shape [2] takes 2"),
        ([[1, 2], [3]], DataType.FP32, [3], "different lengths"),
        ([[1, 2], [3, 4]], DataType.FP32, [1, 4], "nested as [2, 2]"),
        ({}, DataType.FP32, [1], "'data' is an array, got dict"),
        ([float("inf")], DataType.FP64, [1], "too large for a double"),
        ([1], DataType.BYTES, [1], "not all BYTES"),
        ([["a"], []], DataType.BYTES, [1], "different lengths"),
        ([["a"], "b"], DataType.BYTES, [2], "different lengths"),
        (["a", ["b"]], DataType.BYTES, [2], "not all BYTES"),
        ([[]], DataType.FP32, [2], "x has 0 elements"),
        ([["a", "b"], ["c"]], DataType.BYTES, [3], "x: the arrays nested in 'data' have different lengths"),
        ([[["a"], ["b"]], [["c"], ["d", "e"]]], DataType.BYTES, [5], "different lengths"),
        (["a"], DataType.BYTES, [2], "x has 1 elements of data, but shape [2] takes 2"),
    ],
    ids=str,
)
def test_json_values_that_are_not_exact_are_refused(
    values: Any, datatype: DataType, shape: list[int], message: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        from_values(values, datatype, shape, what="x")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([10**20], [1e20]),  # as JavaScript writes 1e20
        ([10**20, 0.5, -(10**25)], [1e20, 0.5, -1e25]),
        ([[2**64], [-1]], [[2.0**64], [-1.0]]),
        ([2**63, -1], [2.0**63, -1.0]),
        ([2**64 - 1], [2.0**64]),
    ],
    ids=str,
)
def test_integers_of_any_size_are_floats_where_floats_are_wanted(values: Any, expected: Any) -> None:
    shape = list(np.shape(expected))
    assert from_values(values, DataType.FP64, shape, what="x").tolist() == expected
    with np.errstate(over="ignore"):
        narrow = np.array(expected, np.float32)
    np.testing.assert_array_equal(from_values(values, DataType.FP32, shape, what="x"), narrow)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([10**400], "x: an element is too large for a double"),
        ([10**20, None], "x: its elements are not all FP64"),
        ([10**20, True], "x: its elements are not all FP64"),
        ([10**20, "1"], "x: its elements are not all FP64"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_numbers_beyond_a_double_are_refused_beside_large_integers(values: Any, message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        from_values(values, DataType.FP64, [len(values)], what="x")
    assert str(caught.value) == message


def test_typed_numbers_are_checked_against_the_range_of_the_datatype() -> None:
    assert from_numbers([1, -2], DataType.INT8, [2], what="x").tolist() == [1, -2]
    assert from_numbers([], DataType.INT8, [0], what="x").dtype == np.int8
    with pytest.raises(InvalidInputError, match="out of the range of INT8"):
        from_numbers([200], DataType.INT8, [1], what="x")
    with pytest.raises(InvalidInputError, match="x has 1 elements"):
        from_numbers([1], DataType.INT8, [2], what="x")
    with pytest.raises(InvalidInputError, match="x has 1 elements"):
        from_elements([b"a"], [2], what="x")


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["nan", "inf"])
def test_values_beyond_json_are_refused_with_advice(value: float) -> None:
    with pytest.raises(InvalidInputError, match="binary_data"):
        to_values(np.array([value], np.float32), DataType.FP32, what="y")
    with pytest.raises(InvalidInputError, match="binary_data"):
        to_values(np.array([b"\xff"], np.object_), DataType.BYTES, what="y")


def test_outputs_of_a_model_are_passed_on_unchanged() -> None:
    for array, datatype in (
        (np.array([b"a", b""], np.object_), DataType.BYTES),
        (np.zeros((2, 0), np.float32), DataType.BF16),
        (np.ones(2, np.int8), DataType.INT8),
    ):
        assert conformed(array, datatype, what="y") is array


def test_outputs_of_a_model_must_have_its_datatype() -> None:
    with pytest.raises(ServingError, match="should be FP32"):
        conformed(np.zeros(2), DataType.FP32, what="y")
    with pytest.raises(ServingError, match="not of type bytes"):
        conformed(np.array(["text"], np.object_), DataType.BYTES, what="y")
