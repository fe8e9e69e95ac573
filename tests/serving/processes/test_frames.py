"""Frames arrive whole, in order, however their bytes are cut; unfinished ones never do."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import ServingError
from mlsys_serving.processes import FrameReader, frame


@given(st.lists(st.binary(max_size=50)), st.lists(st.integers(1, 60)), st.integers(0, 60))
def test_frames_come_out_as_they_went_in(payloads: list[bytes], cuts: list[int], num_lost: int):
    data = b"".join(map(frame, payloads))
    cut = data[: max(0, len(data) - num_lost)]
    reader, found = FrameReader(), []
    for size in cuts:
        found += reader.feed(cut[:size])
        cut = cut[size:]
    found += reader.feed(cut)
    num_whole, left = 0, max(0, len(data) - num_lost)
    for payload in payloads:
        left -= len(frame(payload))
        num_whole += left >= 0
    assert found == payloads[:num_whole]


def test_a_length_that_cannot_be_is_refused():
    with pytest.raises(ServingError, match="claims 4294967295 bytes"):
        list(FrameReader().feed(struct.pack("<I", 0xFFFFFFFF)))
