"""The GRU cells that models are made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from mlsys_batchmaker.cells.cell import cell
from mlsys_batchmaker.native.runner import Form, LayerForm
from mlsys_batchmaker.plan.spec import Port


class GRUWeights(nn.Module):
    """The weights of a GRU in torch's form, and its step.

    Args:
        input_size: Width of the input.
        hidden_size: Width of the state.
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size = input_size
        self.hidden_size = hidden_size
        # Rows: reset, update and candidate gate, hidden_size each.
        self.weight_ih = nn.Parameter(torch.empty(3 * hidden_size, input_size))
        self.weight_hh = nn.Parameter(torch.empty(3 * hidden_size, hidden_size))
        self.bias_ih = nn.Parameter(torch.zeros(3 * hidden_size))
        self.bias_hh = nn.Parameter(torch.zeros(3 * hidden_size))
        for weight in (self.weight_ih, self.weight_hh):
            nn.init.uniform_(weight, -(hidden_size**-0.5), hidden_size**-0.5)

    def forward(self, inputs: Tensor, hidden: Tensor) -> Tensor:
        """Run one step: inputs [b, input], hidden [b, h] -> hidden."""
        return self.step(functional.linear(inputs, self.weight_ih, self.bias_ih), hidden)

    def step(self, from_inputs: Tensor, hidden: Tensor) -> Tensor:
        """Compute the recurrent half of a step, given the inputs' part of the gates [b, 3h]."""
        from_hidden = functional.linear(hidden, self.weight_hh, self.bias_hh)
        size = 2 * self.hidden_size
        reset, update = torch.sigmoid(from_inputs[:, :size] + from_hidden[:, :size]).chunk(2, dim=1)
        candidate = torch.tanh(from_inputs[:, size:] + reset * from_hidden[:, size:])
        return (1 - update) * candidate + update * hidden

    def layer_form(self) -> LayerForm:
        """Return the weights for the compiled loops."""
        of_candidate = torch.arange(3 * self.hidden_size) >= 2 * self.hidden_size
        bias = self.bias_ih + torch.where(of_candidate, 0.0, self.bias_hh)
        return LayerForm(self.hidden_size, bias, self.weight_ih.t(), self.weight_hh.t(), hidden_bias=self.bias_hh)


class _WordGRU(nn.Module):
    """An embedding and a GRU, of which the cells below are made.

    Args:
        num_words: size of the vocabulary.
        embedding_size: width of a word's embedding.
        hidden_size: width of the state.
    """

    def __init__(self, num_words: int, embedding_size: int, hidden_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, embedding_size)
        self.gru = GRUWeights(embedding_size, hidden_size)

    def word_ports(self) -> list[Port]:
        """Return the ports of a word and of the state."""
        word = Port("word", "int64", high=self.embedding.num_embeddings)
        return [word, Port("h", "float32", (self.gru.hidden_size,))]


@cell
class WordGRUCell(_WordGRU):
    """A step of a sequence encoder."""

    def ports(self) -> tuple[Sequence[Port], Sequence[Port]]:
        """See :class:`mlsys_batchmaker.cells.cell.HasPorts`."""
        word, hidden = self.word_ports()
        return [word, hidden], [hidden]

    def forward(self, word: Tensor, hidden: Tensor) -> Tensor:
        """Run one step: word [b], hidden [b, h] -> hidden."""
        output: Tensor = self.gru(self.embedding(word), hidden)
        return output

    def run_steps(
        self, first: dict[int, Tensor], each: dict[int, Tensor], carry: Sequence[int], sizes: Sequence[int]
    ) -> list[list[Tensor]] | None:
        """See :class:`mlsys_batchmaker.cells.cell.RunsSteps`."""
        if tuple(carry) != (-1, 0):
            return None
        inputs = functional.linear(
            functional.embedding(each[0], self.embedding.weight), self.gru.weight_ih, self.gru.bias_ih
        )
        hidden = first[1]
        outputs: list[list[Tensor]] = []
        for step, size in enumerate(sizes):
            hidden = self.gru.step(inputs[step, :size], hidden[:size])
            outputs.append([hidden])
        return outputs

    def form(self) -> Form:
        """See :class:`mlsys_batchmaker.native.runner.HasForm`."""
        return Form("gru", [self.gru.layer_form()], self.embedding.weight)


@cell
class WordGRUDecoderCell(_WordGRU):
    """A "feed previous" decoder step with a GRU."""

    def __init__(self, num_words: int, embedding_size: int, hidden_size: int) -> None:
        super().__init__(num_words, embedding_size, hidden_size)
        self.projection = nn.Linear(hidden_size, num_words)

    def ports(self) -> tuple[Sequence[Port], Sequence[Port]]:
        """See :class:`mlsys_batchmaker.cells.cell.HasPorts`."""
        return self.word_ports(), self.word_ports()

    def forward(self, word: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Run one step: word [b], hidden [b, h] -> the next word, hidden."""
        hidden = self.gru(self.embedding(word), hidden)
        return self.projection(hidden).argmax(dim=1), hidden

    def form(self) -> Form:
        """See :class:`mlsys_batchmaker.native.runner.HasForm`."""
        projection = self.projection.weight, self.projection.bias
        return Form("gru", [self.gru.layer_form()], self.embedding.weight, projection)


@cell
class WordGRUBeamCell(_WordGRU):
    """A decoder step of a beam search: the best next words and their log probabilities, for one hypothesis a row.

    ``width`` is the number of words that it gives.
    """

    def __init__(self, num_words: int, embedding_size: int, hidden_size: int, width: int) -> None:
        super().__init__(num_words, embedding_size, hidden_size)
        self.projection = nn.Linear(hidden_size, num_words)
        self.width = width

    def ports(self) -> tuple[Sequence[Port], Sequence[Port]]:
        """See :class:`mlsys_batchmaker.cells.cell.HasPorts`."""
        word, hidden = self.word_ports()
        best = [Port("scores", "float32", (self.width,)), Port("words", "int64", (self.width,))]
        return [word, hidden], [*best, hidden]

    def forward(self, word: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run one step: word [b], hidden [b, h] -> log probabilities [b, width], falling, their words, hidden."""
        hidden = self.gru(self.embedding(word), hidden)
        scores, words = torch.log_softmax(self.projection(hidden), dim=1).topk(self.width, dim=1)
        return scores, words, hidden
