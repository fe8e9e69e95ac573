"""Live voices in virtual time: every frame is answered, and not before it is there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mlsys_batchmaker.cells.cell import make_cell
from mlsys_batchmaker.cells.lstm import StackedLSTMCell
from mlsys_batchmaker.streams.model import CellStream, stream_of
from mlsys_bench.batchmaker.voice_virtual import VirtualStreams


def stream() -> CellStream:
    torch.manual_seed(0)
    cell = make_cell("frame", StackedLSTMCell(8, 16, 1))
    return stream_of(cell, states={"h0": "h0", "c0": "c0"}, answer="h0")


@pytest.mark.parametrize("max_batch", [1, 64])
def test_every_frame_is_answered_after_it_came(max_batch: int) -> None:
    voices = [np.zeros((10, 8), dtype=np.float32)]
    system = VirtualStreams(stream(), 6, workers=2, max_batch=max_batch)
    found = system.live(voices, 0.32)
    assert len(system.latencies_s) == 6 * 10
    assert min(system.latencies_s) > 0
    assert not found["is_lost"]
    assert found["p50_s"] <= found["p90_s"] <= found["p99_s"]
    assert found["batch"] <= max_batch


def test_a_peak_counts_all_frames() -> None:
    system = VirtualStreams(stream(), 5, workers=2, max_batch=3)
    rate = system.peak([np.zeros((4, 8), dtype=np.float32)], 4)
    assert len(system.latencies_s) == 20
    assert rate == pytest.approx(20 / max(system.latencies_s), rel=0.05)
