"""Chains: an LSTM over words, and sequence to sequence with a decoder that feeds on its own words."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from mlsys_batchmaker.cells.cell import make_cell
from mlsys_batchmaker.cells.lstm import WordLSTMCell, WordLSTMDecoderCell
from mlsys_batchmaker.models.model import Model, Payload, Tensor, number, sequence
from mlsys_batchmaker.plan import CellGraph, Wire
from mlsys_batchmaker.plan.spec import DEFAULT_BATCH_SIZES
from mlsys_batchmaker.scheduling.requests import Values


class SequenceEncoder:
    """words [n] -> the last hidden state [hidden].

    Args:
        hidden_size: width of the state.
    """

    name = "lstm"
    inputs: tuple[Tensor, ...] = (Tensor("words", "int64", (-1,)),)

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size
        self.outputs: tuple[Tensor, ...] = (Tensor("hidden", "float32", (hidden_size,)),)

    def unfold(self, request: Payload, graph: CellGraph) -> None:
        """Add one chain."""
        words = sequence(request, "words")
        chain = graph.chain("lstm", len(words), each={"word": words}, carry={"h": "h", "c": "c"})
        graph.result(chain.last("h"))

    def structure_key(self, request: Payload) -> tuple[Hashable, Sequence[ArrayLike]]:
        """Return the length and the words: sentences of one length unfold alike."""
        words = sequence(request, "words")
        return len(words), (words,)

    def finish(self, request: Payload, values: Sequence[Values]) -> Payload:
        """Return the state of the last step."""
        return {"hidden": np.asarray(values[-1][0])}

    def example(self) -> Payload:
        """Return a request of three words."""
        return {"words": np.zeros(3, dtype=np.int64)}

    def config(self) -> Mapping[str, Any]:
        """See :class:`mlsys_batchmaker.models.model.Architecture`."""
        return {"hidden_size": self.hidden_size}


class Seq2Seq:
    """words [n] -> words [m]: encoder chain, then decoder chain, until ``eos`` or ``n + extra_steps`` words.

    A request may name the number of steps itself, as ``steps`` (one whole number); the scheduler makes no use of it.

    Args:
        go: the word the decoder begins with.
        extra_steps: the decoder takes at most as many steps as there are input words, and these.
        max_steps: and never more than these.
    """

    name = "seq2seq"
    inputs: tuple[Tensor, ...] = (Tensor("words", "int64", (-1,)), Tensor("steps", "int64", (1,), is_optional=True))
    outputs: tuple[Tensor, ...] = (Tensor("words", "int64", (-1,)),)

    def __init__(self, *, go: int = 1, extra_steps: int = 10, max_steps: int = 1024) -> None:
        self.go = go
        self.extra_steps = extra_steps
        self.max_steps = max_steps

    def unfold(self, request: Payload, graph: CellGraph) -> None:
        """Add two chains; the decoder's is as long as it can become."""
        words, steps = self._sizes(request)
        encoder = graph.chain("encoder", len(words), each={"word": words}, carry={"h": "h", "c": "c"})
        first: dict[str, Wire | ArrayLike] = {"word": self.go, "h": encoder.last("h"), "c": encoder.last("c")}
        graph.result(graph.chain("decoder", steps, carry={"word": "word", "h": "h", "c": "c"}, first=first))

    def structure_key(self, request: Payload) -> tuple[Hashable, Sequence[ArrayLike]]:
        """Return lengths and words: sentences of one length, with as many steps to decode, unfold alike."""
        words, steps = self._sizes(request)
        return (len(words), steps), (words,)

    def _sizes(self, request: Payload) -> tuple[NDArray[np.generic], int]:
        """Return the words, and how many steps the decoder may take."""
        words = sequence(request, "words")
        bound = min(len(words) + self.extra_steps, self.max_steps)
        return words, number(request, "steps", bound, low=1, high=self.max_steps)

    def finish(self, request: Payload, values: Sequence[Values]) -> Payload:
        """Return the words, including the one that stopped the decoder."""
        return {"words": np.array([value[0] for value in values], dtype=np.int64)}

    def example(self) -> Payload:
        """Return a request of two words."""
        return {"words": np.zeros(2, dtype=np.int64)}

    def config(self) -> Mapping[str, Any]:
        """See :class:`mlsys_batchmaker.models.model.Architecture`."""
        return {"go": self.go, "extra_steps": self.extra_steps, "max_steps": self.max_steps}


def lstm_model(
    *,
    num_words: int = 2000,
    hidden_size: int = 1024,
    batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES,
    seed: int = 0,
    name: str = "lstm",
) -> Model:
    """Make a sequence encoder with random weights."""
    torch.manual_seed(seed)
    cell = make_cell("lstm", WordLSTMCell(num_words, hidden_size), results=["h"], batch_sizes=batch_sizes)
    return Model(name, [cell], SequenceEncoder(hidden_size))


def seq2seq_model(
    *,
    num_words: int = 30_000,
    hidden_size: int = 1024,
    eos: int | None = 2,
    encoder_batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES,
    decoder_batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES,
    seed: int = 0,
    name: str = "seq2seq",
) -> Model:
    """Make an encoder and a decoder with random weights; with ``eos=None`` the decoder takes every step it may."""
    torch.manual_seed(seed)
    encoder = make_cell("encoder", WordLSTMCell(num_words, hidden_size), batch_sizes=encoder_batch_sizes)
    decoder = make_cell(
        "decoder",
        WordLSTMDecoderCell(num_words, hidden_size),
        results=["word"],
        stop=None if eos is None else ("word", eos),
        priority=1,
        batch_sizes=decoder_batch_sizes,
    )
    return Model(name, [encoder, decoder], Seq2Seq())
