"""The engine of streams on real cells: equal to the stream alone, errors stay in their stream, states move."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from mlsys_batchmaker.cells.cell import Cell, cell, make_cell
from mlsys_batchmaker.cells.gru import WordGRUCell
from mlsys_batchmaker.cells.lstm import StackedLSTMCell
from mlsys_batchmaker.plan.spec import Port
from mlsys_batchmaker.streams.engine import StreamEngine
from mlsys_batchmaker.streams.frames import Answered, StreamConfig, StreamsFullError, UnknownStreamError
from mlsys_batchmaker.streams.model import CellStream, stream_of
from mlsys_core.errors import InvalidInputError
from torch import Tensor, nn


@cell
class Adder(nn.Module):
    """A running sum, which refuses negative numbers."""

    def ports(self) -> tuple[Sequence[Port], Sequence[Port]]:
        return [Port("x", "float32", (2,)), Port("s", "float32", (2,))], [Port("s", "float32", (2,))]

    def forward(self, x: Tensor, s: Tensor) -> Tensor:
        return x + s


def lstm() -> CellStream:
    torch.manual_seed(0)
    made = make_cell("frame", StackedLSTMCell(8, 24, 2))
    return stream_of(made, states={name: name for name in ("h0", "c0", "h1", "c1")}, answer="h1")


def module() -> CellStream:
    stream = lstm()
    stream.packed = None
    return stream


def converse(engine: StreamEngine, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Push the frames of all streams in turn, and return each stream's answers in order."""
    found: dict[int, list[Answered]] = defaultdict(list)
    left = sum(map(len, inputs))
    done = threading.Event()

    def sink(answers: Sequence[Answered]) -> None:
        nonlocal left
        with lock:
            for each in answers:
                found[each.frame.token].append(each)
            left -= len(answers)
            if not left:
                done.set()

    lock = threading.Lock()
    for number in range(len(inputs)):
        engine.open(number, sink)
    for step in range(max(map(len, inputs))):
        for number, frames in enumerate(inputs):
            if step < len(frames):
                engine.push(number, frames[step], is_last=step == len(frames) - 1, token=number)
    assert done.wait(600)
    for number in range(len(inputs)):
        assert [each.frame.number for each in found[number]] == [*range(len(inputs[number]))]
    return [np.stack([each.value for each in found[number]]) for number in range(len(inputs))]


@pytest.mark.parametrize("make", [lstm, module])
@pytest.mark.parametrize("num_slots", [4, 64])
def test_every_stream_is_equal_to_itself_alone_to_the_bit(make: object, num_slots: int) -> None:
    stream = make()  # type: ignore[operator]
    rng = np.random.default_rng(1)
    inputs = [rng.standard_normal((length, 8)).astype(np.float32) for length in rng.integers(1, 20, size=23)]
    with StreamEngine(stream, StreamConfig(num_slots=num_slots, max_batch=7)) as engine:
        together = converse(engine, inputs)
        assert len(engine) == 0
    assert engine.counters.frames == sum(map(len, inputs))
    swapped = engine.counters.swapped_in
    with StreamEngine(stream, StreamConfig(num_slots=1, num_workers=1)) as alone:
        for frames, answers in zip(inputs, together, strict=True):
            np.testing.assert_array_equal(alone.run(frames), answers)
    assert (swapped > 0) == (num_slots == 4)


def test_the_loops_are_the_cells_own_module_within_rounding() -> None:
    frames = np.random.default_rng(2).standard_normal((12, 8)).astype(np.float32)
    with StreamEngine(lstm()) as loops, StreamEngine(module()) as modules:
        np.testing.assert_allclose(loops.run(frames), modules.run(frames), atol=1e-5)


def test_a_gru_of_words_streams_as_well() -> None:
    torch.manual_seed(1)
    made = make_cell("gru", WordGRUCell(11, 8, 16))
    state = made.spec.outputs[0].name
    stream = stream_of(made, states={"h": state}, answer=state)
    words = np.random.default_rng(3).integers(0, 11, size=9)
    with StreamEngine(stream) as engine:
        whole = engine.run(words)
        engine.open("words", print)
        with pytest.raises(InvalidInputError, match=r"11 lies outside \[0, 11\)"):
            engine.push("words", np.array(11))
    assert stream.packed is not None
    hidden = torch.zeros(1, 16)
    with torch.inference_mode():
        for word, answer in zip(words, whole, strict=True):
            (hidden,) = made.run(torch.tensor([word]), hidden)
            np.testing.assert_allclose(hidden[0].numpy(), answer, atol=1e-5)


def test_an_error_ends_its_own_stream_alone() -> None:
    stream = stream_of(make_cell("sum", Adder()), states={"s": "s"}, answer="s")
    with StreamEngine(stream, StreamConfig(num_workers=1)) as engine:
        answers: list[Answered] = []
        told = threading.Event()

        def sink(each: Sequence[Answered]) -> None:
            answers.extend(each)
            if any(one.frame.is_last for one in answers):
                told.set()

        engine.open("bad", sink)
        engine.open("good", sink)
        engine.push("bad", np.full(2, np.inf, dtype=np.float32))
        engine.push("good", np.ones(2, dtype=np.float32))
        engine.push("good", np.ones(2, dtype=np.float32), is_last=True)
        assert told.wait(600)
        by_name = {name: [each for each in answers if each.frame.stream.stream_id == name] for name in ("bad", "good")}
        assert "not finite" in str(by_name["bad"][0].error)
        assert [float(each.value[0]) for each in by_name["good"] if each.value is not None] == [1.0, 2.0]
        with pytest.raises(UnknownStreamError, match="no stream 'bad'"):
            engine.push("bad", np.ones(2, dtype=np.float32))


def test_what_does_not_fit_is_refused() -> None:
    stream = lstm()
    with StreamEngine(stream, StreamConfig(max_streams=1)) as engine:
        engine.open("a", print)
        with pytest.raises(StreamsFullError, match="limit"):
            engine.open("b", print)
        with pytest.raises(InvalidInputError, match=r"float32\[8\], got float64\[8\]"):
            engine.push("a", np.zeros(8))
        engine.close_stream("a")
    with pytest.raises(InvalidInputError, match="num_workers=0"):
        StreamConfig(num_workers=0)
    made: Cell = stream.cell
    with pytest.raises(InvalidInputError, match="is no input and output"):
        stream_of(made, states={"q": "h0"}, answer="h1")
    with pytest.raises(InvalidInputError, match="needs one input that is no state"):
        stream_of(made, states={"h0": "h0"}, answer="h1")


def test_idle_streams_end() -> None:
    with StreamEngine(lstm(), StreamConfig(idle_timeout_s=0.0)) as engine:
        engine.open("a", print)
        assert engine.end_idle() <= 1
        assert "a" not in engine
