"""Tensors in shared memory: what is put is read, whatever its dtype, and pages come back."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from mlsys_serving.instances.shared import INLINE_NBYTES, PAGE_NBYTES, SharedPart, read

DTYPES = [np.dtype(name) for name in ("f4", "f8", "f2", "i8", "i4", "u1", "?")]


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=5),
        st.sampled_from(DTYPES).flatmap(
            lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40))
        ),
        max_size=4,
    ),
    st.lists(st.binary(max_size=300), max_size=30),
)
def test_what_is_put_is_read(given_arrays, texts):
    given_arrays["texts"] = np.array([*texts, b""], np.object_)
    memory = mmap.mmap(-1, 400 * PAGE_NBYTES)
    part = SharedPart(memory, 100, 300)
    placed = part.put(given_arrays)
    found = read(memory, placed.layout, placed.inline, placed.page)
    assert list(found) == list(given_arrays)
    for name, array in given_arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert not found[name].flags.writeable
        np.testing.assert_array_equal(found[name], array)
    if placed.page is not None:
        assert 100 <= placed.page < 400
        part.free(placed.page, placed.num_pages)
    assert part.num_used == 0


def test_small_tensors_and_those_without_room_are_bytes():
    memory = mmap.mmap(-1, 64 * PAGE_NBYTES)
    part = SharedPart(memory, 0, 64)
    large = {"x": np.arange(INLINE_NBYTES, dtype="u1").repeat(4)}
    assert part.put({"x": np.zeros(8)}).page is None
    first, second, third, fourth, fifth = (part.put(large) for _ in range(5))
    assert [each.page is None for each in (first, second, third, fourth, fifth)] == [False] * 4 + [True]
    np.testing.assert_array_equal(read(memory, fifth.layout, fifth.inline, fifth.page)["x"], large["x"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no forks")
def test_a_child_reads_what_its_parent_put_after_the_fork():
    memory = mmap.mmap(-1, 64 * PAGE_NBYTES)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reader, 1)
        is_same = read(memory, [["x", "<i8", [5000], 0]], b"", 2)["x"].sum() == sum(range(5000))
        os._exit(0 if is_same else 1)
    placed = SharedPart(memory, 2, 32).put({"x": np.arange(5000)})
    assert (placed.page, placed.layout) == (2, [["x", "<i8", [5000], 0]])
    os.write(writer, b"!")
    assert os.waitpid(pid, 0)[1] == 0
    os.close(reader)
    os.close(writer)
