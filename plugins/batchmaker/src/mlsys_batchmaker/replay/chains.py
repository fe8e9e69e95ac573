"""Whole batches of requests on the very loops that cellular batching runs: the baseline's best kernel."""

from __future__ import annotations

import numpy as np
import torch
from mlsys_core.errors import MissingDependencyError

from mlsys_batchmaker.cells.cell import Cell
from mlsys_batchmaker.native.runner import Ints, PackedCell, Runner
from mlsys_batchmaker.workers.pool import host_rows

_WORDS = 1 << 18  # of words: 512 sentences of 512


def packed(cell: Cell) -> PackedCell:
    """Return the cell's compiled loops.

    Raises:
        MissingDependencyError: there is no C++ compiler.
    """
    if cell.packed is None:
        raise MissingDependencyError("baselines run on compiled loops, and no C++ compiler was found: install g++")
    return cell.packed


class Chains:
    """Rows of one cell whose chains all begin at once; row 0 of each bank is zeros, request i has row 1 + i.

    Args:
        cell: a chain's.
        banks: by port name, of states; others are made.
    """

    def __init__(self, cell: Cell, banks: dict[str, torch.Tensor] | None = None) -> None:
        self.banks = {} if banks is None else banks
        for port in (*cell.spec.inputs, *cell.spec.outputs):
            rows = _WORDS if port.name == "word" else 1024
            self.banks.setdefault(port.name, host_rows(rows, port.shape, port.dtype))
        inputs, outputs = ([self.banks[port.name] for port in ports] for ports in (cell.spec.inputs, cell.spec.outputs))
        self._num_inputs, self._num_outputs = len(inputs), len(outputs)
        self.runner = Runner(packed(cell), inputs, outputs)

    def run(self, words: np.ndarray, lengths: Ints | None, *, is_fresh: bool) -> None:
        """Compute words [steps, b] (a decoder: [1, b] for all its steps); fresh rows begin with zeros."""
        steps, size = words.shape
        self.banks["word"].numpy()[1 : 1 + words.size] = words.reshape(-1)
        rows = np.zeros((steps, size, self._num_inputs), dtype=np.int64)
        rows[:, :, 0] = 1 + np.arange(words.size).reshape(steps, size)
        if not is_fresh:
            rows[:, :, 1:] = 1 + np.arange(size)[:, None]
        self.runner.run(rows, np.repeat(1 + np.arange(size)[:, None], self._num_outputs, axis=1), lengths)


def decode(decoder: Chains, size: int, steps: int, first: int) -> np.ndarray:
    """Decode words [size, steps] from the states that are there; a row that says the stopping word drops out."""
    decoder.run(np.full((steps, size), first), None, is_fresh=False)
    at, rows = np.meshgrid(np.arange(steps), np.arange(size))
    return decoder.runner.results(0, at.reshape(-1), rows.reshape(-1)).reshape(size, steps)
