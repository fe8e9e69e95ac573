"""Recurrent cells: the unit of batching.

A cell is an ``nn.Module`` whose every input and output has the batch as its first dimension, so that rows of different
requests, at different steps, can run as one batch (BatchMaker, sections 3.1 and 4.1). Its weights are inside it.
"""

from __future__ import annotations

import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor, nn


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
        """A cell with copies of the weights of ``cell``, in its dtype and on its device."""
        copied = LSTMCell(cell.input_size, cell.hidden_size).to(cell.weight_ih)
        with torch.no_grad():
            copied.weight.copy_(torch.cat([cell.weight_ih, cell.weight_hh], dim=1).t())
            if cell.bias:
                copied.bias.copy_(cell.bias_ih + cell.bias_hh)
        return copied

    def forward(self, inputs: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One step for each row.

        Args:
            inputs: [b, input_size].
            hidden: [b, hidden_size], of the step before.
            state: [b, hidden_size], the cell state of the step before.

        Returns:
            The new ``hidden`` and ``state``, [b, hidden_size] each.
        """
        gates = torch.addmm(self.bias, torch.cat([inputs, hidden], dim=1), self.weight)
        keep_in, forget, candidate, keep_out = gates.chunk(4, dim=1)
        new_state = torch.sigmoid(forget) * state + torch.sigmoid(keep_in) * torch.tanh(candidate)
        return torch.sigmoid(keep_out) * torch.tanh(new_state), new_state
