"""Results of nodes for their requests, by slot: written a task at a time, read by each request at its end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlsys_batchmaker.plan.layout import Layout
from mlsys_batchmaker.plan.plan import GraphPlan
from mlsys_batchmaker.scheduling.requests import Values

Ints = NDArray[np.int64]


class Results:
    """A table for each result that cells give: by its index among ``CellSpec.results``, dtype and shape.

    Args:
        layout: layout of the model's cells.
    """

    def __init__(self, layout: Layout) -> None:
        keys: dict[tuple[int, str, tuple[int, ...]], int] = {}
        self._of_cell: list[list[int]] = []
        for cell in layout.cells:
            ports = [cell.outputs[output] for output in cell.results]
            own = [(index, *port.signature) for index, port in enumerate(ports)]
            self._of_cell.append([keys.setdefault(key, len(keys)) for key in own])
        self._tables: list[NDArray[np.generic]] = [np.empty((0, *shape), dtype=dtype) for _, dtype, shape in keys]
        self._room = 0

    def reserve(self, count: int) -> None:
        """Reserve room for slots below ``count``, in each table from the next write on."""
        if count > self._room:
            self._room = max(count, 2 * self._room, 256)

    def _with_room(self, number: int) -> NDArray[np.generic]:
        table = self._tables[number]
        if len(table) < self._room:
            grown = np.empty((self._room, *table.shape[1:]), dtype=table.dtype)
            grown[: len(table)] = table
            table = self._tables[number] = grown
        return table

    def write(self, cell: int, slots: Ints, columns: tuple[NDArray[np.generic], ...]) -> None:
        """Write the results of a task of ``cell``, by ``CellSpec.results``."""
        for number, column in zip(self._of_cell[cell], columns, strict=True):
            self._with_room(number)[slots] = column

    def read_several(self, cell: int, slots: Ints, counts: Sequence[int]) -> list[list[Values]]:
        """Return the results of several requests, all of ``cell``: for each as many of ``slots`` as ``counts`` says."""
        columns = [self._rows(self._tables[number], slots) for number in self._of_cell[cell]]
        values = list(zip(*columns, strict=True))
        ends = list(accumulate(counts))
        return [values[end - count : end] for count, end in zip(counts, ends, strict=True)]

    def read(self, plan: GraphPlan, first: int, is_there: NDArray[np.bool_] | None) -> list[Values]:
        """Return the results of a request, in the order it asked for; its slots begin with ``first``.

        Args:
            plan: plan of the request.
            first: its first slot.
            is_there: by result asked for; None: all are.
        """
        if plan.num_slots == 1 and plan.result_cell is not None and is_there is None:
            return [tuple([self._tables[number][first].copy() for number in self._of_cell[plan.result_cell]])]
        asked = plan.asked
        slots = asked[1] + first
        if is_there is not None:
            slots = slots[is_there]
        if plan.result_cell is not None:
            columns = [self._tables[number][slots] for number in self._of_cell[plan.result_cell]]
            return list(zip(*columns, strict=True))
        cells = asked[3] if is_there is None else asked[3][is_there]
        return [
            tuple(self._tables[number][slot].copy() for number in self._of_cell[cell])
            for slot, cell in zip(slots.tolist(), cells.tolist(), strict=True)
        ]

    @staticmethod
    def _rows(table: NDArray[np.generic], slots: Ints) -> Sequence[Any]:
        """Return rows of a table, each with memory of its own, which a client may keep."""
        return list(table[slots]) if table.ndim == 1 else [table[slot].copy() for slot in slots.tolist()]
