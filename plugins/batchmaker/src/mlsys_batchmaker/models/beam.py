"""Beam search over a GRU decoder: which cells come next depends on what the last ones gave.

Each step runs one decoder cell for each hypothesis that is alive; all steps of all requests are batched together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mlsys_batchmaker.cells.cell import make_cell
from mlsys_batchmaker.cells.gru import WordGRUBeamCell, WordGRUCell
from mlsys_batchmaker.models.model import Model, Payload, Tensor, sequence
from mlsys_batchmaker.plan import CellGraph
from mlsys_batchmaker.plan.spec import DEFAULT_BATCH_SIZES
from mlsys_batchmaker.scheduling.requests import Values


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Words said so far and the sum of their log probabilities."""

    words: tuple[int, ...]
    score: float
    row: int = -1  # row of the latest part whose state it continues


class BeamSearch:
    """words [n] -> words [m] and their score: the best hypothesis that ended, or the best of all at the bound.

    Args:
        width: hypotheses kept.
        go: the word the decoder begins with.
        eos: the word that ends a hypothesis.
        max_steps: words of the answer at most.
    """

    name = "beam-search"
    inputs: tuple[Tensor, ...] = (Tensor("words", "int64", (-1,)),)
    outputs: tuple[Tensor, ...] = (Tensor("words", "int64", (-1,)), Tensor("score", "float32", (1,)))

    def __init__(self, *, width: int = 4, go: int = 1, eos: int = 2, max_steps: int = 20) -> None:
        self.width = width
        self.go = go
        self.eos = eos
        self.max_steps = max_steps

    def unfold(self, request: Payload, graph: CellGraph) -> None:
        """Add the encoder's chain and the first decoder step; :meth:`extend` adds the rest."""
        words = sequence(request, "words")
        encoder = graph.chain("encoder", len(words), each={"word": words}, carry={"h": "h"})
        graph.result(graph.add("decoder", {"word": self.go, "h": encoder.last("h")}))

    def extend(self, request: Payload, parts: Sequence[Sequence[Values]], graph: CellGraph) -> bool:
        """Add one decoder step for each live hypothesis; see :class:`mlsys_batchmaker.models.model.Grows`."""
        alive, _ = self._search(parts)
        if not alive:
            return False
        states = np.stack([np.asarray(parts[-1][each.row][2]) for each in alive])
        first = graph.add_many("decoder", len(alive), each={"word": [each.words[-1] for each in alive], "h": states})
        for node in range(first, first + len(alive)):
            graph.result(node)
        return True

    def finish(self, request: Payload, values: Sequence[Values]) -> Payload:
        """Return the best hypothesis."""
        parts: list[Sequence[Values]] = []
        at = 0
        while at < len(values):  # the first part has one row, others as many as hypotheses were alive
            size = len(self._search(parts)[0]) if parts else 1
            parts.append(values[at : at + size])
            at += size
        ended = self._search(parts)[1]
        best = max(ended, key=lambda each: each.score)
        return {"words": np.array(best.words, dtype=np.int64), "score": np.array([best.score], dtype=np.float32)}

    def example(self) -> Payload:
        """Return a request of two words."""
        return {"words": np.zeros(2, dtype=np.int64)}

    def config(self) -> Mapping[str, Any]:
        """See :class:`mlsys_batchmaker.models.model.Architecture`."""
        return {"width": self.width, "go": self.go, "eos": self.eos, "max_steps": self.max_steps}

    def _search(self, parts: Sequence[Sequence[Values]]) -> tuple[list[Hypothesis], list[Hypothesis]]:
        """Split hypotheses into live and finished ones after ``parts``; drop those that cannot become the best."""
        alive, ended = [Hypothesis((), 0.0, 0)], []
        for step, part in enumerate(parts):
            grown = [
                Hypothesis((*each.words, int(word)), each.score + float(score), row)
                for row, each in enumerate(alive)
                for score, word in zip(np.asarray(part[row][0]), np.asarray(part[row][1]), strict=True)
            ]
            grown.sort(key=lambda each: -each.score)  # stable: equals stay in order
            kept = grown[: self.width]
            is_last = step + 1 == self.max_steps
            ended += [each for each in kept if is_last or each.words[-1] == self.eos]
            bar = max((each.score for each in ended), default=-np.inf)
            alive = [] if is_last else [each for each in kept if each.words[-1] != self.eos and each.score > bar]
        return alive, ended


def beam_model(
    *,
    num_words: int = 100,
    hidden_size: int = 64,
    width: int = 4,
    eos: int = 2,
    max_steps: int = 20,
    batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES,
    seed: int = 0,
    name: str = "beam",
) -> Model:
    """Make an encoder and a decoder with random weights."""
    torch.manual_seed(seed)
    encoder = make_cell("encoder", WordGRUCell(num_words, hidden_size, hidden_size), batch_sizes=batch_sizes)
    decoder = make_cell(
        "decoder",
        WordGRUBeamCell(num_words, hidden_size, hidden_size, width),
        results=["scores", "words", "h"],
        priority=1,
        batch_sizes=batch_sizes,
    )
    return Model(name, [encoder, decoder], BeamSearch(width=width, eos=eos, max_steps=max_steps))
