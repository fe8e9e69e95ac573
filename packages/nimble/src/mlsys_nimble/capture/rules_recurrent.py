"""Recurrent layers, step by step: one GEMM for the inputs of all steps, then a small GEMM and the gates of each step.

So a short sequence is replayed natively, and layers and directions overlap; torch runs a long one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlsys_nimble.capture.builder import Builder, Ref
from mlsys_nimble.capture.rules import rule
from mlsys_nimble.capture.rules_matmul import linear
from mlsys_nimble.ir.operators import Pointwise, Step
from mlsys_nimble.ir.program import ValueType

MAX_STEPS = 256  # unrolled steps, summed over layers and directions

State = tuple[Ref, ...]  # the hidden state and, for an LSTM, the cell state; [B, H] each
Cell = Callable[[Builder, Ref, Ref, State], State]  # builder, gates of input, of hidden, state -> next state


def _lstm_cell(b: Builder, of_input: Ref, of_hidden: Ref, state: State) -> State:
    gates = b.pointwise("add", of_hidden, of_input)
    i, f, g, o = _parts(b, gates, 4)
    steps = (
        *(Step("sigmoid", (1,)), Step("mul", (-1, 3))),  # forget gate times cell
        *(Step("sigmoid", (0,)), Step("tanh", (2,)), Step("mul", (-3, -4)), Step("add", (-2, -5))),
    )
    cell = b.emit(Pointwise(steps, state[1].dtype), [i, f, g, state[1]], state[1].type)
    shown = (Step("sigmoid", (0,)), Step("tanh", (1,)), Step("mul", (-1, -2)))
    return b.emit(Pointwise(shown, cell.dtype), [o, cell], cell.type), cell


def _gru_cell(b: Builder, of_input: Ref, of_hidden: Ref, state: State) -> State:
    (hidden,) = state
    inputs = [*_parts(b, of_input, 3), *_parts(b, of_hidden, 3), hidden]  # reset, update, new of each; hidden
    steps = (
        *(Step("add", (0, 3)), Step("sigmoid", (-1,)), Step("mul", (-2, 5)), Step("add", (2, -3)), Step("tanh", (-4,))),
        *(Step("add", (1, 4)), Step("sigmoid", (-6,))),
        *(Step("sub", (6, -5)), Step("mul", (-8, -7)), Step("add", (-9, -5))),
    )
    return (b.emit(Pointwise(steps, hidden.dtype), inputs, hidden.type),)


def _simple_cell(activation: str) -> Cell:
    return lambda b, of_input, of_hidden, state: (b.pointwise(activation, b.pointwise("add", of_hidden, of_input)),)


def _parts(b: Builder, gates: Ref, count: int) -> list[Ref]:
    width = gates.shape[-1] // count
    return [b.slice(gates, gates.rank - 1, index * width, width) for index in range(count)]


def _layers(
    b: Builder, cell: Cell, x: Ref, initial: Sequence[Ref], params: Sequence[Ref], settings: Sequence[Any]
) -> tuple[Ref, list[Ref]] | None:
    """Emit all layers; None where torch must run them.

    Returns the last layer's output and, for each part of the state, its last value [layers * directions, B, H].
    """
    has_biases, num_layers, dropout, train, bidirectional, batch_first = settings
    directions = 2 if bidirectional else 1
    length = x.shape[1 if batch_first else 0]
    per_layer = 4 if has_biases else 2
    is_plain = len(params) == num_layers * directions * per_layer and all(map(b.is_fixed, params))
    if not is_plain or (train and dropout) or x.type.numel == 0 or length * num_layers * directions > MAX_STEPS:
        return None
    time = 1 if batch_first else 0
    last: list[list[Ref]] = [[] for _ in initial]
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            weights = params[index * per_layer : (index + 1) * per_layer]
            state = tuple(b.select(part, 0, index) for part in initial)
            hiddens, state = _run(b, cell, x, state, weights, time, is_reversed=direction == 1)
            outputs.append(hiddens)
            for part, parts in zip(state, last, strict=True):
                parts.append(b.reshape(part, (1, *part.shape)))
        x = b.concat(outputs, 2)
    return x, [b.concat(parts, 0) for parts in last]


def _run(
    b: Builder, cell: Cell, x: Ref, state: State, weights: Sequence[Ref], time: int, *, is_reversed: bool
) -> tuple[Ref, State]:
    """Emit one layer in one direction; return its hidden states along ``time`` and the last state."""
    w_input, w_hidden, *biases = weights
    b_input, b_hidden = biases or (None, None)
    gates = linear(b, x, w_input, b_input)
    length = x.shape[time]
    hiddens: list[Ref] = []
    for step in reversed(range(length)) if is_reversed else range(length):
        state = cell(b, b.select(gates, time, step), linear(b, state[0], w_hidden, b_hidden), state)
        batch, width = state[0].shape
        hiddens.append(b.reshape(state[0], (batch, 1, width) if time else (1, batch, width)))
    return b.concat(hiddens[::-1] if is_reversed else hiddens, time), state


@rule("aten.lstm.input")
def _lstm(b: Builder, results: list[ValueType], x: Ref, initial: list[Ref], params: list[Ref], *settings: Any) -> Any:
    found = _layers(b, _lstm_cell, x, initial, params, settings)
    return NotImplemented if found is None else [found[0], *found[1]]


def _one_state(cell: Cell) -> Any:
    def recurrent(b: Builder, results: list[ValueType], x: Ref, initial: Ref, params: list[Ref], *settings: Any) -> Any:
        found = _layers(b, cell, x, [initial], params, settings)
        return NotImplemented if found is None else [found[0], *found[1]]

    return recurrent


rule("aten.gru.input")(_one_state(_gru_cell))
rule("aten.rnn_tanh.input")(_one_state(_simple_cell("tanh")))
rule("aten.rnn_relu.input")(_one_state(_simple_cell("relu")))


def _single(cell: Cell) -> Any:
    """Return the rule for one step of one layer, such as nn.GRUCell."""

    def step(b: Builder, result: Any, x: Ref, state: Any, w_input: Ref, w_hidden: Ref, *biases: Ref | None) -> Any:
        b_input, b_hidden = biases or (None, None)
        state = (state,) if isinstance(state, Ref) else tuple(state)
        if x.type.numel == 0 or state[0].dtype != x.dtype:
            return NotImplemented
        made = cell(b, linear(b, x, w_input, b_input), linear(b, state[0], w_hidden, b_hidden), state)
        return made[0] if len(made) == 1 else list(made)

    return step


rule("aten.lstm_cell")(_single(_lstm_cell))
rule("aten.gru_cell")(_single(_gru_cell))
rule("aten.rnn_tanh_cell")(_single(_simple_cell("tanh")))
rule("aten.rnn_relu_cell")(_single(_simple_cell("relu")))
