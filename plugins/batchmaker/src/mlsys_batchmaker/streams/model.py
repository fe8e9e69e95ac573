"""A recurrent network as a stream: frames in, answers out, and states that stay between them.

:class:`StreamModel` says what the engine needs. :func:`stream_of` makes one of any cell: its compiled loops compute the
batch where it has a form for them; else its module computes one row at a time, since torch's sums depend on how many
rows there are, and an answer must not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError
from numpy.typing import NDArray

from mlsys_batchmaker.cells.cell import Cell
from mlsys_batchmaker.native.runner import PackedCell, Runner, gives
from mlsys_batchmaker.plan.spec import Port

Ints = NDArray[np.int64]
Failures = Mapping[int, Exception]  # by row of the batch


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """Facts about a stream: a frame, its answer, and the state between two frames, each the shape of one row."""

    name: str
    frame: Port
    answer: Port
    states: tuple[Port, ...]
    frame_s: float = 0.032  # from one frame to the next, which is also the time that an answer may take
    sample_rate: int | None = None  # frames are samples of sound, so many a second; None: they are not


class Stepper(Protocol):
    """Executor of one thread."""

    def step(self, slots: Ints, frames: NDArray[Any]) -> tuple[NDArray[Any], Failures]:
        """Compute a frame of each of those streams, and write their new states.

        Args:
            slots: [b] rows of the states, all different.
            frames: [b, *frame's shape], contiguous.

        Returns:
            Answers, [b, *answer's shape], and what went wrong, by row; the answers of those rows mean nothing.
        """
        ...


class StreamModel(Protocol):
    """Weights of a stream; shared by all steppers."""

    @property
    def spec(self) -> StreamSpec:
        """Tensors that go in and come out."""
        ...

    def stepper(self, states: Sequence[NDArray[Any]]) -> Stepper:
        """Return a stepper for a worker of its own.

        Args:
            states: by state, [slots, *its shape]; shared by all steppers.
        """
        ...


class CellStream:
    """A cell as a stream; see :func:`stream_of`."""

    def __init__(self, cell: Cell, spec: StreamSpec, carry: Sequence[int], answer: int) -> None:
        self.spec = spec
        self.cell = cell
        self.carry = carry  # by state, the output that is its next value
        self.answer = answer  # the output
        packed = cell.packed
        self.packed: PackedCell | None = None
        if packed is not None and gives(packed, answer) and not packed.kind.startswith("tree"):
            words = int(packed.has_words)
            if list(carry) == [*range(words, words + len(carry))] and not words:
                self.packed = packed

    def stepper(self, states: Sequence[NDArray[Any]]) -> Stepper:
        """See :class:`StreamModel`."""
        if self.packed is not None:
            return _LoopStepper(self.packed, self.answer, states)
        return _ModuleStepper(self, states)


def stream_of(cell: Cell, *, states: Mapping[str, str], answer: str, frame_s: float = 0.032) -> CellStream:
    """Return a stream of a cell whose one input that is no state is the frame.

    Args:
        cell: checked to be batchable.
        states: by input, the output that is its value at the next frame; zeros at the first.
        answer: output that is the answer to a frame.
        frame_s: seconds from one frame to the next.

    Raises:
        InvalidInputError: there is no such input or output, their shapes differ, or not one input is left for frames.

    Example:
        >>> from mlsys_batchmaker.cells.cell import make_cell
        >>> from mlsys_batchmaker.cells.lstm import StackedLSTMCell
        >>> cell = make_cell("frame", StackedLSTMCell(8, 16, 1))
        >>> stream_of(cell, states={"h0": "h0", "c0": "c0"}, answer="h0").spec.frame.shape
        (8,)
    """
    inputs = {port.name: port for port in cell.spec.inputs}
    outputs = {port.name: (number, port) for number, port in enumerate(cell.spec.outputs)}
    for given, came in states.items():
        if given not in inputs or came not in outputs:
            raise InvalidInputError(
                f"stream {cell.spec.name!r}: {given!r} -> {came!r} is no input and output of its cell: it reads "
                f"{', '.join(inputs)} and gives {', '.join(outputs)}"
            )
        if inputs[given].signature != outputs[came][1].signature:
            raise InvalidInputError(f"stream {cell.spec.name!r}: state {given!r} and output {came!r} differ in shape")
    frames = [port for port in cell.spec.inputs if port.name not in states]
    if len(frames) != 1 or answer not in outputs:
        names = ", ".join(port.name for port in frames) or "none"
        raise InvalidInputError(
            f"stream {cell.spec.name!r} needs one input that is no state, and has {names}; its answer is {answer!r} of "
            f"{', '.join(outputs)}"
        )
    kept = [port for port in cell.spec.inputs if port.name in states]
    spec = StreamSpec(cell.spec.name, frames[0], outputs[answer][1], tuple(kept), frame_s)
    return CellStream(cell, spec, [outputs[states[port.name]][0] for port in kept], outputs[answer][0])


class _LoopStepper:
    """The compiled loops, on the rows of the states where they lie."""

    def __init__(self, packed: PackedCell, answer: int, states: Sequence[NDArray[Any]]) -> None:
        self._packed, self._answer = packed, answer
        self._banks = [torch.from_numpy(state) for state in states]

    def step(self, slots: Ints, frames: NDArray[Any]) -> tuple[NDArray[Any], Failures]:
        """See :class:`Stepper`."""
        count = len(slots)
        runner = Runner(self._packed, [torch.from_numpy(frames), *self._banks], self._banks)
        rows = np.empty((1, count, 1 + len(self._banks)), dtype=np.int64)
        rows[0, :, 0] = np.arange(count)
        rows[0, :, 1:] = slots[:, None]
        runner.run(rows, np.repeat(slots[:, None], len(self._banks), axis=1), None)
        return runner.results(self._answer, np.zeros(count, dtype=np.int64), np.arange(count)), {}


class _ModuleStepper:
    """The module, one row at a time."""

    def __init__(self, stream: CellStream, states: Sequence[NDArray[Any]]) -> None:
        self._stream = stream
        self._states = [torch.from_numpy(state) for state in states]
        kept = {port.name: number for number, port in enumerate(stream.spec.states)}
        self._order = [kept.get(port.name) for port in stream.cell.spec.inputs]

    def step(self, slots: Ints, frames: NDArray[Any]) -> tuple[NDArray[Any], Failures]:
        """See :class:`Stepper`."""
        spec = self._stream.spec
        answers = np.zeros((len(slots), *spec.answer.shape), dtype=spec.answer.dtype)
        failures: dict[int, Exception] = {}
        given = torch.from_numpy(frames)
        with torch.inference_mode():
            for row, slot in enumerate(slots):
                at = slice(int(slot), int(slot) + 1)
                inputs = [given[row : row + 1] if n is None else self._states[n][at] for n in self._order]
                try:
                    outputs = self._stream.cell.run(*inputs)
                except Exception as error:  # noqa: BLE001 - the module is the user's; other streams go on
                    failures[row] = error
                    continue
                answers[row] = outputs[self._stream.answer][0].numpy()
                for state, output in zip(self._states, self._stream.carry, strict=True):
                    state[at] = outputs[output]
        return answers, failures
