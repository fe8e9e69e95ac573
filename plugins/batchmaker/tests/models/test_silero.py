"""Silero's network against the wheel's own TorchScript and ONNX files, which nobody here wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from mlsys_batchmaker.models.silero import FRAME, SPEC, frames_of, read_weights, silero_stream
from mlsys_batchmaker.streams.engine import StreamEngine
from mlsys_batchmaker.streams.frames import StreamConfig
from mlsys_bench.batchmaker.voice import speech_like
from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError, MissingDependencyError
from mlsys_core.models import resolve_model
from numpy.typing import NDArray
from safetensors.torch import save_file

try:
    CHECKPOINT: Path | None = resolve_model("silero-vad", settings().cache_dir)
except MissingDependencyError:
    CHECKPOINT = None
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(CHECKPOINT is None, reason="the wheel silero-vad is not installed"),
]


def checkpoint() -> Path:
    assert CHECKPOINT is not None
    return CHECKPOINT


def recordings() -> list[NDArray[np.float32]]:
    """Return frames of voices, of noise and of silence; they begin quietly and differ in length."""
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((40, FRAME)).astype(np.float32) * np.float32(0.1)
    return [*(frames_of(speech_like(3 + seed / 3, seed=seed)) for seed in range(6)), noise, np.zeros_like(noise)]


def test_answers_are_those_of_the_wheels_torchscript() -> None:
    theirs = torch.jit.load(checkpoint().parent / "silero_vad.jit")
    with StreamEngine(silero_stream(checkpoint())) as engine:
        for frames in recordings():
            theirs.reset_states()
            with torch.inference_mode(), torch.jit.optimized_execution(False):
                expected = np.array([float(theirs(torch.from_numpy(each)[None], 16_000)) for each in frames])
            np.testing.assert_allclose(engine.run(frames), expected, atol=2e-5)


def test_answers_are_those_of_the_wheels_onnx() -> None:
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(checkpoint().parent / "silero_vad.onnx", providers=["CPUExecutionProvider"])
    said_speech = 0
    with StreamEngine(silero_stream(checkpoint())) as engine:
        for frames in recordings():
            state, context = np.zeros((2, 1, 128), dtype=np.float32), np.zeros((1, 64), dtype=np.float32)
            expected = []
            for each in frames:
                heard = np.concatenate([context, each[None]], 1)
                answer, state = session.run(None, {"input": heard, "state": state, "sr": np.array(16_000)})
                context = heard[:, -64:]
                expected.append(answer[0, 0])
            np.testing.assert_allclose(engine.run(frames), expected, atol=2e-5)
            said_speech += sum(each > 0.5 for each in expected)
    assert said_speech > 20  # the comparison is not of silence alone


@pytest.mark.parametrize("size", [2, 5, 11, 12, 13, 47, 48, 49, 96])
def test_a_stream_is_equal_to_itself_alone_whatever_its_neighbours(size: int) -> None:
    stream = silero_stream(checkpoint())
    rng = np.random.default_rng(size)
    frames = (rng.standard_normal((6, size, FRAME)) * rng.uniform(0, 3, (size, 1))).astype(np.float32)

    def states(count: int) -> list[NDArray[np.float32]]:
        return [np.zeros((count, *port.shape), dtype=np.float32) for port in SPEC.states]

    together_states, alone_states = states(128), states(128)
    together, alone = stream.stepper(together_states), stream.stepper(alone_states)
    slots = rng.permutation(128)[:size].astype(np.int64)
    for step in frames:
        answers, _ = together.step(slots, step)
        for row in range(size):
            (own,), _ = alone.step(slots[row : row + 1], np.ascontiguousarray(step[row : row + 1]))
            assert own == answers[row]
    for ours, own in zip(together_states, alone_states, strict=True):
        np.testing.assert_array_equal(ours, own)


def test_many_streams_in_the_engine_are_equal_to_each_alone() -> None:
    stream = silero_stream(checkpoint())
    voices = recordings()
    with StreamEngine(stream, StreamConfig(num_slots=3, max_batch=5)) as engine:
        whole = [engine.run(frames) for frames in voices]
        found: list[dict[int, float]] = [{} for _ in voices]

        def sink(answers: object) -> None:
            for each in answers:  # type: ignore[attr-defined]
                found[each.frame.token][each.frame.number] = each.value

        for number in range(len(voices)):
            engine.open(number, sink)
        for step in range(40):
            for number, frames in enumerate(voices):
                engine.push(number, frames[step], token=number)
        for number in range(len(voices)):
            while len(found[number]) < 40:
                torch.zeros(1)
        assert engine.counters.swapped_in > 0
    for answers, expected in zip(found, whole, strict=True):
        np.testing.assert_array_equal([answers[step] for step in range(40)], expected[:40])


def test_other_files_are_refused(tmp_path: Path) -> None:
    weights = read_weights(checkpoint())
    saved = tmp_path / "weights.safetensors"
    save_file(weights, saved)
    assert read_weights(saved).keys() == weights.keys()
    save_file({name: tensor for name, tensor in weights.items() if "rnn" not in name}, saved)
    with pytest.raises(InvalidInputError, match="other tensors"):
        read_weights(saved)
    basis = weights["stft.forward_basis_buffer"].clone()
    basis[3, 0, 7] += 1
    save_file({**weights, "stft.forward_basis_buffer": basis}, saved)
    with pytest.raises(InvalidInputError, match="mirrored window"):
        read_weights(saved)
    (tmp_path / "x.onnx").write_bytes(b"no model")
    with pytest.raises(InvalidInputError):
        read_weights(tmp_path / "x.onnx")


def test_recordings_become_frames() -> None:
    assert frames_of(np.full(513, 16_384, dtype=np.int16)).shape == (2, FRAME)
    assert frames_of(np.full(513, 16_384, dtype=np.int16))[1, :2].tolist() == [0.5, 0.0]
    with pytest.raises(InvalidInputError, match=r"float32\[n\]"):
        frames_of(np.zeros((2, 2), dtype=np.float32))
