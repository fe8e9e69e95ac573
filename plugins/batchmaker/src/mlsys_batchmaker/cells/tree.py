"""The cells of a binary TreeLSTM."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mlsys_batchmaker.cells.cell import cell
from mlsys_batchmaker.native.runner import Form, LayerForm
from mlsys_batchmaker.plan.spec import Port


@cell
class TreeLeafCell(nn.Module):
    """A leaf of a binary TreeLSTM (Tai et al. 2015): a word to hidden and cell state.

    Args:
        num_words: size of the vocabulary.
        hidden_size: width of embedding and states.
    """

    def __init__(self, num_words: int, hidden_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, hidden_size)
        self.gates = nn.Linear(hidden_size, 3 * hidden_size)
        self.hidden_size = hidden_size

    def ports(self) -> tuple[Sequence[Port], Sequence[Port]]:
        """See :class:`mlsys_batchmaker.cells.cell.HasPorts`."""
        states = [Port("h", "float32", (self.hidden_size,)), Port("c", "float32", (self.hidden_size,))]
        return [Port("word", "int64", high=self.embedding.num_embeddings)], states

    def forward(self, word: Tensor) -> tuple[Tensor, Tensor]:
        """Compute a leaf: word [b] -> hidden and state [b, h]."""
        keep_in, keep_out, candidate = self.gates(self.embedding(word)).chunk(3, dim=1)
        state = torch.sigmoid(keep_in) * torch.tanh(candidate)
        return torch.sigmoid(keep_out) * torch.tanh(state), state

    def form(self) -> Form:
        """See :class:`mlsys_batchmaker.native.runner.HasForm`."""
        layer = LayerForm(self.hidden_size, self.gates.bias, self.gates.weight.t())
        return Form("tree-leaf", [layer], self.embedding.weight)


@cell
class TreeInnerCell(nn.Module):
    """An inner node of a binary TreeLSTM: two children's states to its own, with a forget gate for each.

    Args:
        hidden_size: width of the states.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * hidden_size, 5 * hidden_size)
        self.hidden_size = hidden_size

    def ports(self) -> tuple[Sequence[Port], Sequence[Port]]:
        """See :class:`mlsys_batchmaker.cells.cell.HasPorts`."""
        states = [Port("h", "float32", (self.hidden_size,)), Port("c", "float32", (self.hidden_size,))]
        names = ("h_left", "h_right", "c_left", "c_right")
        return [Port(name, "float32", (self.hidden_size,)) for name in names], states

    def forward(self, h_left: Tensor, h_right: Tensor, c_left: Tensor, c_right: Tensor) -> tuple[Tensor, Tensor]:
        """Compute an inner node: hidden and cell states of both children, [b, h] each -> hidden and state."""
        gates = self.gates(torch.cat([h_left, h_right], dim=1))
        keep_in, keep_out, candidate, forget_left, forget_right = gates.chunk(5, dim=1)
        state = torch.sigmoid(keep_in) * torch.tanh(candidate)
        state = state + torch.sigmoid(forget_left) * c_left + torch.sigmoid(forget_right) * c_right
        return torch.sigmoid(keep_out) * torch.tanh(state), state

    def form(self) -> Form:
        """See :class:`mlsys_batchmaker.native.runner.HasForm`."""
        weight = self.gates.weight.t()
        left, right = weight[: self.hidden_size], weight[self.hidden_size :]
        return Form("tree-inner", [LayerForm(self.hidden_size, self.gates.bias, None, left, right)])
