"""The suite ``batchmaker-voice``: live voices through Silero's detector, streams against ONNX Runtime and torch.

All cases stand behind the same scheduler and take turns: streams of BatchMaker, ONNX Runtime called for one frame at a
time (as its maintainers advise), and torch's operators over batches gathered by hand. First all answers are compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from mlsys_batchmaker.cells.cell import cell
from mlsys_batchmaker.models.silero import (
    BINS,
    CONTEXT,
    CONVS,
    SPEC,
    STATES,
    WINDOW,
    frames_of,
    read_weights,
    silero_stream,
)
from mlsys_batchmaker.plan.spec import Port
from mlsys_batchmaker.streams.engine import StreamEngine
from mlsys_batchmaker.streams.frames import Answered, StreamConfig, StreamsFullError
from mlsys_batchmaker.streams.model import Failures, Ints, Stepper, StreamModel
from mlsys_core.config import settings
from mlsys_core.errors import MissingDependencyError, MlsysError
from mlsys_core.loop import WallClock
from mlsys_core.models import resolve_model
from mlsys_core.report import Section, Table
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from mlsys_bench.batchmaker.voice_virtual import VirtualStreams

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

SAMPLE_RATE = 16_000
_VOWELS = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (570, 840, 2410))  # Hz
_BANDWIDTHS = (80.0, 90.0, 120.0)  # Hz


def speech_like(seconds: float, *, seed: int = 0) -> NDArray[np.float32]:
    """Return a recording at 16 kHz, in -1 to 1: words of vowels and hisses with pauses, over a little noise.

    Args:
        seconds: its length.
        seed: of voice, words and noise.
    """
    rng = np.random.default_rng(seed)
    count = int(seconds * SAMPLE_RATE)
    sound = np.zeros(count)
    pitch = rng.uniform(95, 210)
    at = int(rng.uniform(0, 0.3) * SAMPLE_RATE)
    while at < count:
        for _ in range(int(rng.integers(2, 6))):  # syllables of a word
            if rng.random() < 0.4:
                at = _add(sound, at, _hiss(rng, rng.uniform(0.04, 0.09)))
            vowel = _VOWELS[int(rng.integers(len(_VOWELS)))]
            at = _add(sound, at, _vowel(rng, rng.uniform(0.1, 0.24), pitch * rng.uniform(0.85, 1.2), vowel))
        at += int(rng.uniform(0.1, 0.9) * SAMPLE_RATE)
    sound += 0.002 * rng.standard_normal(count)
    return np.clip(sound, -1, 1).astype(np.float32)


def _add(sound: NDArray[np.float64], at: int, part: NDArray[np.float64]) -> int:
    end = min(len(sound), at + len(part))
    if at < end:
        sound[at:end] += part[: end - at]
    return at + len(part)


def _vowel(rng: np.random.Generator, seconds: float, pitch: float, formants: tuple[float, ...]) -> NDArray[np.float64]:
    """Return a voiced sound: the harmonics of a gliding pitch, each as loud as the formants let it through."""
    count = int(seconds * SAMPLE_RATE)
    time = np.arange(count) / SAMPLE_RATE
    glide = pitch * (1 + 0.12 * np.sin(np.pi * time / seconds + rng.uniform(0, np.pi)))
    phase = 2 * np.pi * np.cumsum(glide * (1 + 0.01 * rng.standard_normal(count).cumsum() / 30)) / SAMPLE_RATE
    voice = np.zeros(count)
    for harmonic in range(1, int(3800 / pitch)):
        hertz = harmonic * pitch
        gain = sum(
            weight / np.hypot(1, (hertz - formant) / width)
            for formant, width, weight in zip(formants, _BANDWIDTHS, (1.0, 0.6, 0.3), strict=True)
        )
        voice += gain / harmonic**0.5 * np.sin(harmonic * phase + rng.uniform(0, 2 * np.pi))
    envelope = np.minimum(1, np.minimum(time, seconds - time) / 0.03)
    return 0.25 * envelope * voice / max(1e-9, float(np.abs(voice).max()))


def _hiss(rng: np.random.Generator, seconds: float) -> NDArray[np.float64]:
    """Return an unvoiced sound: noise without its low frequencies."""
    count = int(seconds * SAMPLE_RATE)
    noise = np.diff(rng.standard_normal(count + 1))
    return 0.03 * noise * np.hanning(count)


@cell
class SileroCell(nn.Module):
    """One frame in torch's operators."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in weights.items():
            self.register_buffer(name.replace(".", "_"), tensor)

    def ports(self) -> tuple[Sequence[Port], Sequence[Port]]:
        """See :class:`mlsys_batchmaker.cells.cell.HasPorts`."""
        return [SPEC.frame, *STATES], [SPEC.answer, *STATES]

    def forward(self, samples: Tensor, context: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        """Return the probability of speech [b], and the next states."""

        def weight(name: str) -> Tensor:
            return self.get_buffer(name.replace(".", "_"))

        heard = torch.cat([context, samples], 1)
        padded = functional.pad(heard[:, None], (0, CONTEXT), mode="reflect")
        spectrum = functional.conv1d(padded, weight("stft.forward_basis_buffer"), stride=WINDOW // 2)
        real, imaginary = spectrum[:, :BINS], spectrum[:, BINS:]
        x = torch.sqrt(real**2 + imaginary**2)
        for number, (_, _, stride) in enumerate(CONVS):
            name = f"encoder.{number}.reparam_conv"
            convolved = functional.conv1d(x, weight(f"{name}.weight"), weight(f"{name}.bias"), stride, padding=1)
            x = functional.relu(convolved)
        gates = functional.linear(x[:, :, 0], weight("decoder.rnn.weight_ih"), weight("decoder.rnn.bias_ih"))
        gates = gates + functional.linear(hidden, weight("decoder.rnn.weight_hh"), weight("decoder.rnn.bias_hh"))
        take, keep, candidate, give = gates.chunk(4, 1)
        state = keep.sigmoid() * state + take.sigmoid() * candidate.tanh()
        hidden = give.sigmoid() * state.tanh()
        speech = functional.conv1d(
            functional.relu(hidden)[:, :, None], weight("decoder.decoder.2.weight"), weight("decoder.decoder.2.bias")
        )
        return speech[:, 0, 0].sigmoid(), heard[:, -CONTEXT:], hidden, state


HAND_BATCHES = (32, 128)
LIMIT_S = 0.010  # p99 of a frame that is held to be answered in time
PARTS = (0.95, 0.85, 0.7, 0.5, 0.3)  # of what its peak would hold, until one is
OURS, RUNTIME, BY_HAND = "streams", "ONNX Runtime, one by one", "torch, batched by hand"


class RuntimeStream:
    """The wheel's ONNX file in sessions of one thread, a frame a call."""

    def __init__(self, path: str) -> None:
        self.spec, self._path = SPEC, path

    def stepper(self, states: Sequence[NDArray[Any]]) -> Stepper:
        """Return a session of its own for each worker."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(self._path, options, providers=["CPUExecutionProvider"])
        rate = np.array(16_000, dtype=np.int64)

        class OneByOne:
            def step(self, slots: Ints, frames: NDArray[Any]) -> tuple[NDArray[Any], Failures]:
                context, hidden, state = states
                answers = np.empty(len(slots), dtype=np.float32)
                for row, slot in enumerate(slots):
                    heard = np.concatenate([context[slot], frames[row]])[None]
                    before = np.stack([hidden[slot], state[slot]])[:, None]
                    answer, after = session.run(None, {"input": heard, "state": before, "sr": rate})
                    answers[row] = answer[0, 0]
                    hidden[slot], state[slot] = after[:, 0]
                    context[slot] = heard[0, -len(context[slot]) :]
                return answers, {}

        return OneByOne()


class HandBatchedStream:
    """Torch's operators over the rows of a batch, gathered and scattered."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.spec, self._module = SPEC, SileroCell(weights).eval()

    def stepper(self, states: Sequence[NDArray[Any]]) -> Stepper:
        """Return the loop over shared states."""
        module, kept = self._module, [torch.from_numpy(state) for state in states]

        class Batched:
            def step(self, slots: Ints, frames: NDArray[Any]) -> tuple[NDArray[Any], Failures]:
                rows = torch.from_numpy(slots)
                with torch.inference_mode():
                    answer, *after = module(torch.from_numpy(frames), *(state[rows] for state in kept))
                    for state, value in zip(kept, after, strict=True):
                        state[rows] = value
                return answer.numpy(), {}

        return Batched()


def run(context: BenchContext, *, streams: int = 1000, seconds: float = 4.0, repeats: int = 3) -> Section:
    """Compare answers, then peaks, then the streams that each case holds, then all at the same number of streams.

    Args:
        context: The suite's context; quick has one repeat of 1 s.
        streams: Live streams of the last comparison.
        seconds: Length of each live run.
        repeats: Turns of the peaks; medians count.

    Raises:
        MissingDependencyError: the wheel silero-vad or ONNX Runtime is not installed.
        MlsysError: answers differ.
    """
    seconds, repeats = (1.0, 1) if context.is_quick else (seconds, repeats)
    torch.set_num_threads(1)
    workers = context.num_threads
    models = _models()
    voices = [frames_of(speech_like(4.0, seed=seed)) for seed in range(8)]
    _require_equal(models, voices[:3])
    sizes = {OURS: 96, **{f"{BY_HAND}, {size}": size for size in HAND_BATCHES}, RUNTIME: 1}  # of a batch, at most
    of = {name: models[BY_HAND if name.startswith(BY_HAND) else name] for name in sizes}

    def virtual(name: str, count: int) -> VirtualStreams:
        return VirtualStreams(of[name], count, workers=workers, max_batch=sizes[name])

    peaks: dict[str, list[float]] = {name: [] for name in sizes}
    for _ in range(repeats + 1):  # the first warms up
        for name in sizes:
            peaks[name].append(virtual(name, 512).peak(voices, 8))
    peak = {name: float(np.median(each[1:])) for name, each in peaks.items()}
    held: dict[str, int] = {}
    tries: dict[str, list[dict[str, Any]]] = {name: [] for name in sizes}
    for part in PARTS:
        for name in sizes:
            if name in held:
                continue
            count = max(1, int(part * peak[name] * SPEC.frame_s))
            found = virtual(name, count).live(voices, seconds)
            tries[name].append(found)
            if found["p99_s"] < LIMIT_S and not found["is_lost"]:
                held[name] = count
    at_once = {name: virtual(name, streams).live(voices, seconds) for name in sizes}
    real = {}
    for name, size in sizes.items():
        with StreamEngine(of[name], StreamConfig(num_workers=workers, max_batch=size)) as engine:
            real[name] = _live(engine, voices, streams, seconds)
    rows = []
    for name in sizes:
        ratio = "" if name == OURS else f"{held.get(OURS, 0) / max(1, held.get(name, 0)):.1f}x"
        faster = "" if name == OURS else f"{peak[OURS] / peak[name]:.1f}x"
        times = "too many" if at_once[name]["is_lost"] else _times(at_once[name])
        rows.append([name, f"{peak[name]:,.0f}", faster, f"{held.get(name, 0):,}", ratio, times])
    table = Table(
        ["case", "frames/s", "ours over", "streams held", "ours over", f"p50, p99 at {streams} (ms)"],
        rows,
        f"Frames of 32 ms, {workers} workers, virtual time; held: p99 below {LIMIT_S * 1e3:.0f} ms",
    )
    beside = Table(
        ["case", f"p50, p99 at {streams} (ms)"],
        [[name, _times(found)] for name, found in real.items()],
        "On real threads, with whatever else this machine runs",
    )
    data = {
        "workers": workers,
        "limit_s": LIMIT_S,
        "seconds": seconds,
        "streams": streams,
        "peak_frames_per_s": peaks,
        "streams_held": held,
        "tries": tries,
        "virtual": at_once,
        "real": real,
        "load_average": os.getloadavg(),
    }
    return Section("BatchMaker: live voices", [table, beside], data=data)


def _times(found: Mapping[str, Any]) -> str:
    return f"{found['p50_s'] * 1e3:,.2f}, {found['p99_s'] * 1e3:,.2f}"


def _models() -> dict[str, StreamModel]:
    checkpoint = resolve_model("silero-vad", settings().cache_dir)
    try:
        import onnxruntime  # noqa: F401 - it is there
    except ImportError as error:
        raise MissingDependencyError("this suite compares with ONNX Runtime: pip install onnxruntime") from error
    return {
        OURS: silero_stream(checkpoint),
        BY_HAND: HandBatchedStream(read_weights(checkpoint)),
        RUNTIME: RuntimeStream(str(checkpoint.parent / "silero_vad.onnx")),
    }


def _require_equal(models: dict[str, StreamModel], voices: Sequence[NDArray[np.float32]]) -> None:
    for voice in voices:
        answers = {}
        for name, model in models.items():
            with StreamEngine(model, StreamConfig(num_workers=1)) as engine:
                answers[name] = engine.run(voice)
        for name, found in answers.items():
            worst = float(np.abs(found - answers[RUNTIME]).max())
            if worst > 2e-5:
                raise MlsysError(f"{name} and {RUNTIME} differ by {worst}: their times are not compared")


def _live(
    engine: StreamEngine, voices: Sequence[NDArray[np.float32]], num_streams: int, seconds: float
) -> dict[str, Any]:
    """Let streams speak, each at its own phase, and return the latencies from when a frame was there.

    The generator runs on time whatever the engine does; where a queue is full, the run is lost.
    """
    now = WallClock().now
    rng = np.random.default_rng(num_streams)
    phases = np.sort(rng.uniform(0, SPEC.frame_s, num_streams))
    starts = rng.integers(0, 100, num_streams)
    latencies: list[float] = []
    errors: list[Exception] = []

    def sink(answers: Sequence[Answered]) -> None:
        for each in answers:
            if each.error is not None:
                errors.append(each.error)
            latencies.append(each.answered_s - each.frame.token)

    for number in range(num_streams):
        engine.open(number, sink)
    num_steps = int(seconds / SPEC.frame_s)
    begin_s = now() + 0.05
    sent = 0
    try:
        for step in range(num_steps):
            at_s = begin_s + step * SPEC.frame_s
            number = 0
            while number < num_streams:
                here = now() - at_s
                if phases[number] > here:
                    time.sleep(min(0.002, phases[number] - here))
                    continue
                voice = voices[number % len(voices)]
                frame = voice[(starts[number] + step) % len(voice)]
                due_s = at_s + phases[number]
                engine.push(number, frame, deadline_s=due_s + SPEC.frame_s, token=due_s)
                sent += 1
                number += 1
    except StreamsFullError:  # so many wait that more are refused: the oldest has waited since the beginning
        waited_s = now() - begin_s
        return {"streams": num_streams, "p50_s": waited_s, "p99_s": waited_s, "frames": sent, "is_lost": True}
    give_up_s = now() + 5
    while len(latencies) < sent and now() < give_up_s:
        time.sleep(0.005)
    if errors:
        raise errors[0]
    skip = len(latencies) // 10  # the first tenth warms up
    p50, p99, most = np.percentile(latencies[skip:], (50, 99, 100))
    return {
        "streams": num_streams,
        "p50_s": float(p50),
        "p99_s": float(p99),
        "max_s": float(most),
        "frames": sent,
        "batch": engine.counters.effective_batch_size,
    }
