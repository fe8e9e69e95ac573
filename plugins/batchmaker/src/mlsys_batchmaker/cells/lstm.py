"""LSTM cells, alone, on words, stacked, and as a decoder that feeds on its own words.

Each is an ``nn.Module`` whose every input and output has the batch as its first dimension, so that rows of different
requests, at different steps, can run as one batch (BatchMaker, sections 3.1 and 4.1). Its weights are inside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor, nn
from torch.nn import functional

from mlsys_batchmaker.cells.cell import cell
from mlsys_batchmaker.native.runner import Form, LayerForm
from mlsys_batchmaker.plan.spec import Port


@cell
class LSTMCell(nn.Module):
    """One step of an LSTM, as one matrix multiplication ``[b, input + hidden] @ [input + hidden, 4 hidden]`` and gates.

    Equal to ``torch.nn.LSTMCell`` with its two biases added up (see :meth:`from_torch`).

    Args:
        input_size: Width of the input.
        hidden_size: Width of the hidden and of the cell state.

    Raises:
        InvalidInputError: a size is below 1.

    Example:
        >>> cell = LSTMCell(8, 16)
        >>> hidden, state = cell(torch.zeros(3, 8), torch.zeros(3, 16), torch.zeros(3, 16))
        >>> hidden.shape
        torch.Size([3, 16])
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        if input_size < 1 or hidden_size < 1:
            raise InvalidInputError(f"input_size={input_size}, hidden_size={hidden_size}: both must be at least 1")
        self.input_size = input_size
        self.hidden_size = hidden_size
        # Rows: inputs, then hidden. Columns: input, forget, candidate and output gate, hidden_size each.
        self.weight = nn.Parameter(torch.empty(input_size + hidden_size, 4 * hidden_size))
        self.bias = nn.Parameter(torch.zeros(4 * hidden_size))
        nn.init.uniform_(self.weight, -(hidden_size**-0.5), hidden_size**-0.5)

    @staticmethod
    def from_torch(cell: nn.LSTMCell) -> LSTMCell:
        """Make a cell with copies of the weights of ``cell``, in its dtype and on its device."""
        copied = LSTMCell(cell.input_size, cell.hidden_size).to(cell.weight_ih)
        bias = cell.bias_ih + cell.bias_hh if cell.bias else None
        return copied.load(cell.weight_ih, cell.weight_hh, bias)

    def load(self, weight_ih: Tensor, weight_hh: Tensor, bias: Tensor | None) -> LSTMCell:
        """Take weights in torch's form, [4 hidden, input], [4 hidden, hidden] and the sum of the biases [4 hidden]."""
        with torch.no_grad():
            self.weight.copy_(torch.cat([weight_ih, weight_hh], dim=1).t())
            if bias is not None:
                self.bias.copy_(bias)
        return self

    def ports(self) -> tuple[Sequence[Port], Sequence[Port]]:
        """See :class:`mlsys_batchmaker.cells.cell.HasPorts`."""
        state = (self.hidden_size,)
        inputs = [Port("x", "float32", (self.input_size,)), Port("h", "float32", state), Port("c", "float32", state)]
        return inputs, inputs[1:]

    def forward(self, inputs: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run one step for each row.

        Args:
            inputs: [b, input_size].
            hidden: [b, hidden_size], of the step before.
            state: [b, hidden_size], the cell state of the step before.

        Returns:
            The new ``hidden`` and ``state``, [b, hidden_size] each.
        """
        return lstm_gates(torch.addmm(self.bias, torch.cat([inputs, hidden], dim=1), self.weight), state)

    def run_steps(
        self, first: dict[int, Tensor], each: dict[int, Tensor], carry: Sequence[int], sizes: Sequence[int]
    ) -> list[list[Tensor]] | None:
        """Multiply all inputs at once, then run the steps; see :class:`~mlsys_batchmaker.cells.cell.RunsSteps`."""
        if tuple(carry) != (-1, 0, 1):
            return None
        return self.run_layer(each[0], first[1], first[2], sizes)

    def run_layer(self, inputs: Tensor, hidden: Tensor, state: Tensor, sizes: Sequence[int]) -> list[list[Tensor]]:
        """Run the steps of this layer; the inputs' part of all steps is one GEMM.

        Args:
            inputs: [steps, b, input].
            hidden: [b, h].
            state: [b, h].
            sizes: rows of each step, never rising.

        Returns:
            Hidden and cell state after each step.
        """
        steps, rows, width = inputs.shape
        flat = inputs.reshape(steps * rows, width)
        from_inputs = torch.addmm(self.bias, flat, self.weight[:width]).view(steps, rows, -1)
        outputs: list[list[Tensor]] = []
        for step, size in enumerate(sizes):
            gates = torch.addmm(from_inputs[step, :size], hidden[:size], self.weight[width:])
            hidden, state = lstm_gates_in_place(gates, state[:size])
            outputs.append([hidden, state])
        return outputs

    def layer_form(self) -> LayerForm:
        """Return the weights for the compiled loops."""
        from_input, from_hidden = self.weight[: self.input_size], self.weight[self.input_size :]
        return LayerForm(self.hidden_size, self.bias, from_input, from_hidden)

    def form(self) -> Form:
        """See :class:`mlsys_batchmaker.native.runner.HasForm`."""
        return Form("lstm", [self.layer_form()])


def lstm_gates(gates: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the new hidden and cell state [b, h] for gate sums [b, 4h] (input, forget, candidate, output)."""
    keep_in, forget, candidate, keep_out = gates.chunk(4, dim=1)
    new_state = torch.sigmoid(forget) * state + torch.sigmoid(keep_in) * torch.tanh(candidate)
    return torch.sigmoid(keep_out) * torch.tanh(new_state), new_state


def lstm_gates_in_place(gates: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute :func:`lstm_gates` with fewer temporaries, over contiguous gates."""
    size = state.shape[1]
    candidate = torch.tanh(gates[:, 2 * size : 3 * size])
    kept = torch.sigmoid(gates)
    new_state = (kept[:, size : 2 * size] * state).addcmul_(kept[:, :size], candidate)
    return torch.tanh(new_state).mul_(kept[:, 3 * size :]), new_state


class _WordLSTM(nn.Module):
    """An embedding and an LSTM, of which the cells below are made.

    Args:
        num_words: size of the vocabulary.
        hidden_size: width of embedding and states.
    """

    def __init__(self, num_words: int, hidden_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, hidden_size)
        self.lstm = LSTMCell(hidden_size, hidden_size)

    def word_ports(self) -> list[Port]:
        """Return the ports of a word and of the states."""
        _, states = self.lstm.ports()
        return [Port("word", "int64", high=self.embedding.num_embeddings), *states]


@cell
class WordLSTMCell(_WordLSTM):
    """A step of a sequence encoder."""

    def ports(self) -> tuple[Sequence[Port], Sequence[Port]]:
        """See :class:`mlsys_batchmaker.cells.cell.HasPorts`."""
        word, *states = self.word_ports()
        return [word, *states], states

    def forward(self, word: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run one step: word [b], hidden and state [b, h] -> hidden and state."""
        outputs: tuple[Tensor, Tensor] = self.lstm(self.embedding(word), hidden, state)
        return outputs

    def run_steps(
        self, first: dict[int, Tensor], each: dict[int, Tensor], carry: Sequence[int], sizes: Sequence[int]
    ) -> list[list[Tensor]] | None:
        """See :class:`mlsys_batchmaker.cells.cell.RunsSteps`."""
        if tuple(carry) != (-1, 0, 1):
            return None
        inputs = functional.embedding(each[0], self.embedding.weight)
        return self.lstm.run_layer(inputs, first[1], first[2], sizes)

    def form(self) -> Form:
        """See :class:`mlsys_batchmaker.native.runner.HasForm`."""
        return Form("lstm", [self.lstm.layer_form()], self.embedding.weight)


@cell
class WordLSTMDecoderCell(_WordLSTM):
    """A "feed previous" decoder step: embedding, LSTM, projection to the vocabulary and argmax (section 7.4)."""

    def __init__(self, num_words: int, hidden_size: int) -> None:
        super().__init__(num_words, hidden_size)
        self.projection = nn.Linear(hidden_size, num_words)

    def ports(self) -> tuple[Sequence[Port], Sequence[Port]]:
        """See :class:`mlsys_batchmaker.cells.cell.HasPorts`."""
        return self.word_ports(), self.word_ports()

    def forward(self, word: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run one step: word [b], hidden and state [b, h] -> the next word, hidden, state."""
        hidden, state = self.lstm(self.embedding(word), hidden, state)
        return self.projection(hidden).argmax(dim=1), hidden, state

    def form(self) -> Form:
        """See :class:`mlsys_batchmaker.native.runner.HasForm`."""
        projection = self.projection.weight, self.projection.bias
        return Form("lstm", [self.lstm.layer_form()], self.embedding.weight, projection)


@cell
class StackedLSTMCell(nn.Module):
    """One step through several LSTM layers; a frame in, the states of all layers out.

    Args:
        input_size: width of a frame.
        hidden_size: width of each layer's states.
        num_layers: number of layers.
    """

    def __init__(self, input_size: int, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        sizes = [input_size] + [hidden_size] * (num_layers - 1)
        self.layers = nn.ModuleList(LSTMCell(size, hidden_size) for size in sizes)
        self.input_size = input_size
        self.hidden_size = hidden_size

    def ports(self) -> tuple[Sequence[Port], Sequence[Port]]:
        """Return the inputs x, h0, c0, h1, c1, ...; and the outputs h0, c0, h1, c1, ...."""
        shape = (self.hidden_size,)
        states = [Port(f"{kind}{layer}", "float32", shape) for layer in range(len(self.layers)) for kind in "hc"]
        return [Port("x", "float32", (self.input_size,)), *states], states

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Run one step: x [b, input], states [b, h] each -> states."""
        outputs: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            x, state = layer(x, states[2 * number], states[2 * number + 1])
            outputs += [x, state]
        return tuple(outputs)

    def run_steps(
        self, first: dict[int, Tensor], each: dict[int, Tensor], carry: Sequence[int], sizes: Sequence[int]
    ) -> list[list[Tensor]] | None:
        """Run layer by layer, each over all steps; see :class:`mlsys_batchmaker.cells.cell.RunsSteps`."""
        if tuple(carry) != (-1, *range(2 * len(self.layers))):
            return None
        inputs = each[0]
        outputs: list[list[Tensor]] = [[] for _ in sizes]
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, LSTMCell)
            states = first[1 + 2 * number], first[2 + 2 * number]
            steps = layer.run_layer(inputs, *states, sizes)
            for own, (hidden, state) in zip(outputs, steps, strict=True):
                own += [hidden, state]
            if number + 1 < len(self.layers):
                inputs = torch.zeros(len(sizes), sizes[0], self.hidden_size, dtype=inputs.dtype, device=inputs.device)
                for step, (hidden, _) in enumerate(steps):
                    inputs[step, : sizes[step]] = hidden
        return outputs

    def form(self) -> Form:
        """See :class:`mlsys_batchmaker.native.runner.HasForm`."""
        return Form("lstm", [layer.layer_form() for layer in self.layers if isinstance(layer, LSTMCell)])
