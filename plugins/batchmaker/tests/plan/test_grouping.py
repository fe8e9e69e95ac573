"""The compiled grouping against the one in Python, on graphs of all kinds."""

from __future__ import annotations

import re
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_batchmaker.plan import grouping
from mlsys_core.errors import InvalidInputError, MissingDependencyError


@settings(max_examples=300, deadline=None)
@given(
    count=st.integers(1, 24),
    seed=st.integers(0, 10_000),
    num_cells=st.integers(1, 3),
    shuffled=st.booleans(),
    must_connect=st.booleans(),
)
def test_as_in_python(count: int, seed: int, num_cells: int, shuffled: bool, must_connect: bool):
    rng = np.random.default_rng(seed)
    sources = np.full((count, 3), -1)
    for node in range(1, count):
        sources[node] = np.where(rng.random(3) < 0.6, rng.integers(0, node, 3), -1)
    if seed % 7 == 0:  # some have a cycle
        sources[rng.integers(0, count), 0] = count - 1
    cells = rng.integers(0, num_cells, count)
    if shuffled:
        old = rng.permutation(count)  # new number -> old number
        new = np.argsort(old)
        sources = np.where(sources[old] >= 0, new[sources[old]], -1)
        cells = cells[old]
    is_read = np.zeros(count, dtype=np.bool_)
    is_read[sources[sources >= 0]] = True
    gives = ~is_read if seed % 3 else rng.random(count) < 0.5
    if not gives.any():
        gives[-1] = True
    try:
        expected = grouping._in_python(cells, sources, gives, must_connect)
    except InvalidInputError as error:
        with pytest.raises(InvalidInputError, match=re.escape(str(error))):
            grouping.group_nodes(cells, sources, gives, must_connect=must_connect)
        return
    got = grouping.group_nodes(cells, sources, gives, must_connect=must_connect)
    for each in fields(grouping.GroupArrays):
        ours, theirs = getattr(got, each.name), getattr(expected, each.name)
        if each.name in ("more", "sub_more"):
            assert sorted(ours) == sorted(theirs)
        else:
            np.testing.assert_array_equal(ours, theirs, each.name)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch):
    def missing() -> None:
        raise MissingDependencyError("no C++ compiler")

    chain = (np.zeros(3, dtype=np.int64), np.array([[-1], [0], [1]]), np.array([False, False, True]))
    expected = grouping.group_nodes(*chain)
    monkeypatch.setattr(grouping, "_load", missing)
    assert grouping.group_nodes(*chain).owner.tolist() == expected.owner.tolist() == [0, 0, 0]
