from __future__ import annotations

import multiprocessing
import os

import pytest
from mlsys_core.profiling import Recorder
from mlsys_core.profiling.recording import Process, Recording, Track


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_empty_with_its_own_pid() -> None:
    recorder = Recorder()
    step = recorder.spanner("step")
    with step:
        pass
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        with step:
            pass
        theirs.send([span.track.pid for span in recorder.recording().spans])

    worker = context.Process(target=child)
    worker.start()
    assert ours.poll(30), "the child sent nothing"
    assert ours.recv() == [worker.pid]
    worker.join()
    assert [span.track.pid for span in recorder.recording().spans] == [os.getpid()]


def test_an_empty_recording_has_bounds_and_tracks() -> None:
    recording = Recording((Process(1, "mlsys", ""),))
    assert recording.bounds_ns() == (0, 0)
    assert recording.tracks() == []
    assert Track(1, 2, "t") == (1, 2, "t")
