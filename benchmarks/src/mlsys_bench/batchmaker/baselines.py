"""The figures' baselines on the loops that cellular batching runs, and on ``nn.LSTM``.

Each function returns what makes a :data:`~mlsys_batchmaker.replay.systems.Compute` with memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from mlsys_batchmaker.models.model import Model
from mlsys_batchmaker.native.runner import Ints, Runner
from mlsys_batchmaker.replay.systems import Chains, Compute, decode, packed
from mlsys_batchmaker.replay.trace import Request
from mlsys_batchmaker.workers.pool import host_rows
from torch import nn

_ROOM = 1 << 16  # rows of a bank of a tree's nodes; pages are taken as they are written


def lstm(model: Model, *, pads: bool = True) -> Callable[[], Compute]:
    """Return a maker of sequence encoders that run all rows to the padded length, or each row to its own."""

    def make() -> Compute:
        chains = Chains(model.cells[0])

        def compute(requests: Sequence[Request], length: int) -> Sequence[np.ndarray]:
            if not pads:
                length = max(map(num_words, requests))
            lengths = np.array([num_words(request) for request in requests])
            chains.run(padded(requests, length), None if pads else lengths, is_fresh=True)
            return list(chains.runner.results(0, lengths - 1, np.arange(len(requests))))

        return compute

    return make


def seq2seq(model: Model) -> Callable[[], Compute]:
    """Return a maker of encoder and decoder; the decoder takes as many steps as the longest row needs.

    Rows of the encoder drop out at their ends.
    """
    go = model.architecture.config()["go"]

    def make() -> Compute:
        encoder = Chains(model.cells[0])
        states = {name: encoder.banks[name] for name in ("h", "c")}
        decoder = Chains(model.cells[1], states)

        def compute(requests: Sequence[Request], _: int) -> Sequence[np.ndarray]:
            lengths = np.array([num_words(request) for request in requests])
            encoder.run(padded(requests, int(lengths.max())), lengths, is_fresh=True)
            steps = np.array([int(request["steps"][0]) for request in requests])
            said = decode(decoder, len(requests), int(steps.max()), go)
            return [words[:count] for words, count in zip(said, steps.tolist(), strict=True)]

        return compute

    return make


def num_words(request: Request) -> int:
    """Return the cells of a sequence."""
    return len(request["words"])


def lstm_torch(model: Model) -> Callable[[], Compute]:
    """Return a maker of padded runs of an LSTM, each as one call of ``nn.LSTM``."""
    cell: Any = model.cells[0].module
    hidden_size: int = cell.lstm.hidden_size
    fused: Any = nn.LSTM(hidden_size, hidden_size).eval()
    with torch.no_grad():
        fused.weight_ih_l0.copy_(cell.lstm.weight[:hidden_size].t())
        fused.weight_hh_l0.copy_(cell.lstm.weight[hidden_size:].t())
        fused.bias_ih_l0.copy_(cell.lstm.bias)
        fused.bias_hh_l0.zero_()

    def compute(requests: Sequence[Request], length: int) -> Sequence[np.ndarray]:
        inputs = cell.embedding(torch.from_numpy(padded(requests, length)))
        outputs, _ = fused(inputs)
        return _pick(outputs, requests)

    return lambda: compute


def padded(requests: Sequence[Request], length: int) -> np.ndarray:
    """Return words [length, requests], padded with word 0."""
    words = np.zeros((length, len(requests)), dtype=np.int64)
    for column, request in enumerate(requests):
        words[: len(request["words"]), column] = request["words"]
    return words


def _pick(outputs: torch.Tensor, requests: Sequence[Request]) -> list[np.ndarray]:
    """Return each request's state at its own last step, out of [length, requests, hidden]."""
    return [outputs[num_words(request) - 1, row].numpy().copy() for row, request in enumerate(requests)]


class Trees:
    """Nodes of trees: each has its own row of hidden and cell state."""

    def __init__(self, model: Model) -> None:
        leaf, inner = model.cells
        shape = leaf.spec.outputs[0].shape
        self.words, self.hidden, self.state = (
            host_rows(_ROOM, (), "int64"),
            host_rows(_ROOM, shape, "float32"),
            host_rows(_ROOM, shape, "float32"),
        )
        states = [self.hidden, self.state]
        self._leaf = Runner(packed(leaf), [self.words], states)
        self._inner = Runner(packed(inner), [self.hidden, self.hidden, self.state, self.state], states)

    def leaves(self, rows: Ints, words: Ints) -> None:
        """Compute leaves."""
        self.words.numpy()[: len(words)] = words
        self._leaf.run(np.arange(len(words))[None, :, None], np.stack([rows, rows], axis=1), None)

    def nodes(self, rows: Ints, left: Ints, right: Ints) -> None:
        """Compute inner nodes of children that are there."""
        self._inner.run(np.stack([left, right, left, right], axis=1)[None], np.stack([rows, rows], axis=1), None)

    def roots(self, rows: Ints) -> Sequence[np.ndarray]:
        """Return the hidden states of the roots."""
        return list(self.hidden.numpy()[rows])


def tree_per_height(model: Model) -> Callable[[], Compute]:
    """Return a maker that batches as TensorFlow Fold does: all nodes of one height of all trees at once."""

    def make() -> Compute:
        trees = Trees(model)

        def compute(requests: Sequence[Request], _: int) -> Sequence[np.ndarray]:
            leaves, words, levels, roots = _merge(requests)
            trees.leaves(leaves, words)
            for level in levels:
                nodes, left, right = np.array(level).T.copy()
                trees.nodes(nodes, left, right)
            return trees.roots(roots)

        return compute

    return make


def tree_ideal(model: Model) -> Callable[[], Compute]:
    """Return a maker for trees of one shape: the graph is fixed, each node one batch over all trees (section 7.5)."""

    def make() -> Compute:
        trees = Trees(model)

        def compute(requests: Sequence[Request], _: int) -> Sequence[np.ndarray]:
            size, count = len(requests), len(requests[0]["words"])
            rows = np.arange(size)
            for leaf in range(count):
                trees.leaves(leaf * size + rows, np.array([request["words"][leaf] for request in requests]))
            for number, (left, right) in enumerate(requests[0]["children"].tolist()):
                trees.nodes((count + number) * size + rows, left * size + rows, right * size + rows)
            return trees.roots((2 * count - 2) * size + rows)

        return compute

    return make


def _merge(requests: Sequence[Request]) -> tuple[Ints, Ints, list[list[tuple[int, int, int]]], Ints]:
    """Return rows and words of all leaves, (node, left, right) by height, and the roots."""
    rows: list[Ints] = []
    levels: list[list[tuple[int, int, int]]] = []
    roots: list[int] = []
    base = 0
    for request in requests:
        count = len(request["words"])
        rows.append(np.arange(base, base + count))
        heights = [0] * count
        for number, (left, right) in enumerate(request["children"].tolist()):
            height = max(heights[left], heights[right])
            heights.append(height + 1)
            if height == len(levels):
                levels.append([])
            levels[height].append((base + count + number, base + left, base + right))
        base += 2 * count - 1
        roots.append(base - 1)
    words = np.concatenate([request["words"] for request in requests])
    return np.concatenate(rows), words, levels, np.array(roots)
