"""Silero's voice activity detector (``silero_vad`` wheel, 16 kHz) as a stream: 512 samples in, a probability out.

Its maintainers advise against batches, since the network keeps its state to itself and the states of speakers would
mix. Here the state is the stream's: the last 64 samples, and the hidden and cell state of one LSTM cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError, MissingDependencyError
from mlsys_core.native import Kernel, bind, new
from numpy.typing import NDArray
from torch import Tensor

from mlsys_batchmaker.plan.planner import address_of
from mlsys_batchmaker.plan.spec import Port
from mlsys_batchmaker.streams.model import Failures, Ints, Stepper, StreamSpec

SAMPLE_RATE = 16_000
FRAME, CONTEXT, WINDOW = 512, 64, 256  # samples
BINS, _WIDE, _NARROW = WINDOW // 2 + 1, 128, 64
CONVS = ((BINS, _WIDE, 1), (_WIDE, _NARROW, 2), (_NARROW, _NARROW, 2), (_NARROW, _WIDE, 1))  # in, out, stride
_SHAPES: dict[str, tuple[int, ...]] = {
    "stft.forward_basis_buffer": (2 * BINS, 1, WINDOW),
    **{f"encoder.{n}.reparam_conv.weight": (out, given, 3) for n, (given, out, _) in enumerate(CONVS)},
    **{f"encoder.{n}.reparam_conv.bias": (out,) for n, (_, out, _) in enumerate(CONVS)},
    **{f"decoder.rnn.weight_{each}": (4 * _WIDE, _WIDE) for each in ("ih", "hh")},
    **{f"decoder.rnn.bias_{each}": (4 * _WIDE,) for each in ("ih", "hh")},
    "decoder.decoder.2.weight": (1, _WIDE, 1),
    "decoder.decoder.2.bias": (1,),
}
_HERE = Path(__file__).parents[1] / "native"
SILERO = Kernel(_HERE / "silero.cpp", headers=tuple(sorted(_HERE.glob("*.h"))))

STATES = (
    Port("context", "float32", (CONTEXT,)),
    Port("hidden", "float32", (_WIDE,)),
    Port("state", "float32", (_WIDE,)),
)
SPEC = StreamSpec(
    "silero-vad",
    Port("samples", "float32", (FRAME,)),
    Port("speech", "float32"),
    STATES,
    frame_s=FRAME / SAMPLE_RATE,
    sample_rate=SAMPLE_RATE,
)


class SileroStream:
    """The network for the compiled loop (``native/silero.cpp``); a :class:`StreamModel`."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.spec = SPEC
        self._library = _load()
        self._units: int = self._library.silero_units()
        self._kept: list[Tensor] = []  # tensors that the structure points into
        half = WINDOW // 2
        basis = weights["stft.forward_basis_buffer"][:, 0]
        real, imaginary = basis[:BINS], basis[BINS:]
        convs = [weights[f"encoder.{number}.reparam_conv.weight"] for number in range(len(CONVS))]
        taps = [conv.permute(2, 1, 0) for conv in convs]  # [3, in, out]
        bias = weights["decoder.rnn.bias_ih"] + weights["decoder.rnn.bias_hh"]
        self.structure = new(
            self._library.structs["Network"],
            window=WINDOW,
            out_bias=float(weights["decoder.decoder.2.bias"]),
            real=self._pack(_folded(real)[:half].T, 1),
            imaginary=self._pack(imaginary[:half, :half].T, 1),
            highest=self._keep(_folded(real)[half]),
            **{f"conv{number + 1}": self._pack(taps[number].flatten(0, 1), 1) for number in range(3)},
            conv4=self._pack(taps[3][1], 1),
            **{f"bias{n + 1}": self._keep(weights[f"encoder.{n}.reparam_conv.bias"]) for n in range(len(CONVS))},
            from_input=self._pack(weights["decoder.rnn.weight_ih"].T, 4),
            from_hidden=self._pack(weights["decoder.rnn.weight_hh"].T, 4),
            gate_bias=self._keep(bias.view(4, _WIDE // self._units, self._units).transpose(0, 1)),
            out_weight=self._keep(weights["decoder.decoder.2.weight"].flatten()),
        )

    def stepper(self, states: Sequence[NDArray[Any]]) -> Stepper:
        """See :class:`StreamModel`."""
        return _SileroStepper(self, states)

    def _pack(self, weight: Tensor, gates: int) -> dict[str, int]:
        source = weight.contiguous()
        width = source.shape[1] // gates
        packed = torch.empty(-(-width // self._units) * gates, len(source), self._units)
        self._library.silero_pack(source.data_ptr(), packed.data_ptr(), len(source), gates, width)
        return {"panels": self._keep(packed), "K": len(source)}

    def _keep(self, tensor: Tensor) -> int:
        kept = tensor.detach().float().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()


class _SileroStepper:
    """One thread's buffers of the compiled loop."""

    def __init__(self, stream: SileroStream, states: Sequence[NDArray[Any]]) -> None:
        self._library, self._stream, self._states = stream._library, stream, states  # kept alive: C points there
        self._handle = self._library.silero_runner(byref(stream.structure))
        context, hidden, state = map(address_of, states)
        self._frames = new(
            self._library.structs["Frames"],
            count=0,
            slots=None,
            samples=None,
            context=context,
            hidden=hidden,
            state=state,
            speech=None,
        )

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._library.silero_free(self._handle)

    def step(self, slots: Ints, frames: NDArray[Any]) -> tuple[NDArray[Any], Failures]:
        """See :class:`Stepper`."""
        speech = np.empty(len(slots), dtype=np.float32)
        task = self._frames
        task.count, task.slots, task.samples = len(slots), address_of(slots), address_of(frames)
        task.speech = address_of(speech)
        self._library.silero_run(self._handle, byref(task))
        return speech, {}


def silero_stream(checkpoint: Path) -> SileroStream:
    """Load the stream with the weights of ``silero_vad_16k_op15.onnx``, or of a saved folder.

    Args:
        checkpoint: ``.onnx`` of the ``silero_vad`` wheel, or ``.safetensors``.

    Raises:
        InvalidInputError: the file has other tensors.
        KernelUnavailableError: there is no library and no C++ compiler.
    """
    return SileroStream(read_weights(checkpoint))


def frames_of(samples: NDArray[Any]) -> NDArray[np.float32]:
    """Return a recording's frames, [n, 512] of float32 in -1 to 1; the last is filled up with silence.

    Args:
        samples: [samples] at 16 kHz, float32 or int16.

    Raises:
        InvalidInputError: they are neither, or not in one row.
    """
    if samples.dtype == np.int16:
        samples = samples.astype(np.float32) / np.float32(32768)
    if samples.dtype != np.float32 or samples.ndim != 1:
        raise InvalidInputError(
            f"samples are float32[n] or int16[n] at 16 kHz, got {samples.dtype}{list(samples.shape)}"
        )
    missing = -len(samples) % FRAME
    return np.pad(samples, (0, missing)).reshape(-1, FRAME)


@cache
def _load() -> Any:
    return bind(SILERO.load())


def _folded(real: Tensor) -> Tensor:
    """Return the weights of mirrored sums: the middle sample in the place of the first, which weighs nothing."""
    half = WINDOW // 2
    return torch.cat([real[:, half : half + 1], real[:, 1:half]], 1)


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Return the network's tensors by name, from the wheel's ``.onnx`` or a saved ``.safetensors``.

    Raises:
        InvalidInputError: the file has other tensors.
        MissingDependencyError: it is ``.onnx`` and onnx is not installed.
    """
    found = _from_onnx(checkpoint) if checkpoint.suffix == ".onnx" else _from_safetensors(checkpoint)
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    if shapes != _SHAPES or any(tensor.dtype != torch.float32 for tensor in found.values()):
        raise InvalidInputError(f"{checkpoint} has other tensors than Silero's 16 kHz network: take silero_vad 6.2.3")
    basis = found["stft.forward_basis_buffer"][:, 0]
    real, imaginary = basis[:BINS], basis[BINS:]
    mirrored = basis[:, 1:].flip(1)
    even, odd = torch.equal(real[:, 1:], mirrored[:BINS]), torch.equal(imaginary[:, 1:], -mirrored[BINS:])
    if not (even and odd and not basis[:, 0].any() and not imaginary[[0, -1]].any()):
        raise InvalidInputError(f"{checkpoint}: its Fourier weights are not those of a mirrored window")
    return found


def _from_safetensors(checkpoint: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(checkpoint))
    except (OSError, SafetensorError) as error:
        raise InvalidInputError(f"{checkpoint} cannot be read: {error}") from error


def _from_onnx(checkpoint: Path) -> dict[str, Tensor]:
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError as error:
        raise MissingDependencyError(
            "Silero's weights are an .onnx file, and reading it needs onnx: pip install onnx"
        ) from error
    from google.protobuf.message import DecodeError

    try:
        tensors = onnx.load(checkpoint).graph.initializer
        arrays = {each.name.removeprefix("model."): numpy_helper.to_array(each) for each in tensors}
    except (OSError, DecodeError, ValueError) as error:
        raise InvalidInputError(f"{checkpoint} cannot be read: {error}") from error
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
