"""Layout of values: one *bank* of rows for each dtype and row shape that the cells of a model have.

A row holds one value: a constant of a request or an output of a node. Row 0 of every bank is all zeros and never
written, so a missing input reads it. Cells of different types that pass values on share a bank, so a value is passed
on by its row number alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mlsys_core.errors import InvalidInputError
from numpy.typing import NDArray

from mlsys_batchmaker.plan.spec import CellSpec, Signature

ZERO_ROW = 0


class Layout:
    """The banks of a model's cells.

    Args:
        cells: in the order of their numbers.

    Raises:
        InvalidInputError: there is no cell, or two have one name.

    Example:
        >>> from mlsys_batchmaker.plan.spec import Port
        >>> h = Port("h", "float32", (4,))
        >>> Layout([CellSpec("rnn", (Port("token", "int64"), h), (h,))]).banks
        (('int64', ()), ('float32', (4,)))
    """

    def __init__(self, cells: Sequence[CellSpec]) -> None:
        self.cells = tuple(cells)
        self.numbers = {cell.name: number for number, cell in enumerate(self.cells)}
        if not self.cells or len(self.numbers) < len(self.cells):
            raise InvalidInputError("a model needs at least one cell, and each a name of its own")
        banks: dict[Signature, int] = {}
        for cell in self.cells:
            for port in (*cell.inputs, *cell.outputs):
                banks.setdefault(port.signature, len(banks))
        self.banks = tuple(banks)
        self._output_indices: dict[str, dict[int, int]] = {}
        for number, cell in enumerate(self.cells):
            for index, port in enumerate(cell.outputs):
                self._output_indices.setdefault(port.name, {})[number] = index
        self._only_output_indices: dict[str, int | None] = {}
        self._inputs = [{port.name: number for number, port in enumerate(cell.inputs)} for cell in self.cells]
        self.num_inputs = max(len(cell.inputs) for cell in self.cells)
        self.num_outputs = max(len(cell.outputs) for cell in self.cells)
        self.none = len(banks)  # the bank of a port that a cell does not have
        self.input_banks = self._table(banks, self.num_inputs, "inputs")  # [cells, num_inputs]
        self.bank_of_input = self.input_banks.tolist()
        self.output_banks = self._table(banks, self.num_outputs, "outputs")  # [cells, num_outputs]

    def cell_number(self, name: str) -> int:
        """Return the number of the cell called ``name``.

        Raises:
            InvalidInputError: the model has none.
        """
        try:
            return self.numbers[name]
        except KeyError:
            raise InvalidInputError(f"there is no cell {name!r}: this model has {', '.join(self.numbers)}") from None

    def input_index(self, cell: int, name: str) -> int:
        """Return the position of the input called ``name``.

        Raises:
            InvalidInputError: the cell has none.
        """
        found = self._inputs[cell].get(name)
        return self.cells[cell].input_index(name) if found is None else found

    def output_indices(self, name: str) -> dict[int, int]:
        """Return the position of an output of that name in each cell that has one.

        Raises:
            InvalidInputError: no cell has one.
        """
        indices = self._output_indices.get(name)
        if indices is None:
            raise InvalidInputError(f"no cell of this model has an output {name!r}")
        return indices

    def only_output_index(self, name: str) -> int | None:
        """Return the position of an output, if it is the same in all cells that have it; else None.

        Raises:
            InvalidInputError: no cell has one.
        """
        if name not in self._only_output_indices:
            indices = set(self.output_indices(name).values())
            self._only_output_indices[name] = next(iter(indices)) if len(indices) == 1 else None
        return self._only_output_indices[name]

    def _table(self, banks: dict[Signature, int], width: int, kind: str) -> NDArray[np.int64]:
        table = np.full((len(self.cells), width), self.none, dtype=np.int64)
        for number, cell in enumerate(self.cells):
            for index, port in enumerate(getattr(cell, kind)):
                table[number, index] = banks[port.signature]
        return table
