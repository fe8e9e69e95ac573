"""Stop strings across any borders between pieces."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from mlsys_orca.api.text_stream import StopStringFilter

text = st.text(alphabet="abc", max_size=30)
stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3)


@given(text, stops, st.lists(st.integers(0, 30), max_size=6))
def test_the_answer_is_cut_at_the_first_stop_string_wherever_the_borders_fall(whole, stop_strings, cuts):
    borders = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    stop = StopStringFilter(stop_strings)
    shown = "".join(stop.push(whole[a:b]) for a, b in pairwise(borders))
    shown += "" if stop.is_stopped else stop.finish()
    ends = [(whole.find(s) + len(s), whole.find(s)) for s in stop_strings if s in whole]
    assert stop.is_stopped == bool(ends)
    assert shown == (whole[: min(ends)[1]] if ends else whole)


@given(text, stops)
def test_nothing_is_held_back_without_need(whole, stop_strings):
    stop = StopStringFilter(stop_strings)
    shown = stop.push(whole)
    if not stop.is_stopped:
        held = whole[len(shown) :]
        assert held == "" or any(s.startswith(held) for s in stop_strings)
