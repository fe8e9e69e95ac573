"""Measuring a cell, and what is drawn of it."""

from __future__ import annotations

import pytest
import torch
from mlsys_batchmaker.cells.knee import UNIT, knee_figure, profile_lstm_cell
from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling.profile_table import ProfileTable, UnitProfile


def test_every_batch_size_is_measured_and_threads_are_set_back():
    before = torch.get_num_threads()
    seen: list[tuple[int, int]] = []
    table = profile_lstm_cell(
        8,
        [1, 3, 5],
        num_threads=before + 1,
        warmup=1,
        repeats=2,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert table[UNIT].batch_sizes == (1, 3, 5)
    assert all(seconds > 0 for seconds in table[UNIT].seconds)
    assert seen[-1] == (9, 9)
    assert torch.get_num_threads() == before


def test_threads_are_used_while_measuring():
    during: list[int] = []
    count = torch.get_num_threads() + 1
    profile_lstm_cell(4, [1], num_threads=count, progress=lambda *_: during.append(torch.get_num_threads()))
    assert set(during) == {count}


@pytest.mark.parametrize(
    ("hidden", "sizes", "threads", "says"),
    [
        (0, [1], 1, "at least 1"),
        (8, [], 1, "at least one"),
        (8, [2, 1], 1, "rising"),
        (8, [1], 0, "num_threads=0"),
        (8, [-5], 1, "rising"),
        (8, [1, 10**9], 1, "does not fit"),
        (10**6, [1], 1, "does not fit"),
    ],
)
def test_bad_arguments_are_refused(hidden: int, sizes: list[int], threads: int, says: str):
    with pytest.raises(InvalidInputError, match=says):
        profile_lstm_cell(hidden, sizes, num_threads=threads)


def test_the_figure_marks_each_batch_size_and_the_knee():
    table = ProfileTable((UnitProfile(UNIT, (1, 2, 4), (0.001, 0.001, 0.002)),))
    (axes,) = knee_figure(table, 2, title="x").axes
    assert [text.get_text() for text in axes.texts] == ["1", "2", "4"]
    curve, knee = axes.lines
    assert curve.get_xdata().tolist() == pytest.approx([1000, 2000, 2000])
    assert list(curve.get_ydata()) == pytest.approx([1, 1, 2])
    assert (knee.get_xdata()[0], knee.get_ydata()[0]) == pytest.approx((2000, 1))
