"""The cell graph of one request: nodes are cells, edges are data flow (BatchMaker, section 3.1).

A model's ``unfold`` builds one with :meth:`CellGraph.add`, :meth:`CellGraph.add_many` and :meth:`CellGraph.chain`.
Structure (which cell, what feeds it) and constants (the request's own numbers) are kept apart, so that what the planner
makes of a structure is made once for all requests that share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from mlsys_core.errors import InvalidInputError
from numpy.typing import ArrayLike, NDArray

from mlsys_batchmaker.plan.layout import Layout

# What feeds an input of a node: 0 is zeros, 1 + node * num_outputs + output a wire, -1 - row a constant of the bank.
Codes: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Wire:
    """One output of one node."""

    node: int
    output: str


@dataclass(frozen=True, slots=True)
class Chain:
    """Nodes of one cell, each fed by the one before; see :meth:`CellGraph.chain`."""

    start: int  # its first node
    length: int

    def last(self, output: str) -> Wire:
        """That output of its last node."""
        return Wire(self.start + self.length - 1, output)


class CellGraph:
    """A cell graph under construction.

    Args:
        layout: of the model's cells.
        max_nodes: more are refused.

    Example:
        >>> from mlsys_batchmaker.plan.spec import CellSpec, Port
        >>> h = Port("h", "float32", (4,))
        >>> graph = CellGraph(Layout([CellSpec("rnn", (Port("token", "int64", high=9), h), (h,))]))
        >>> words = graph.chain("rnn", 3, each={"token": [5, 1, 2]}, carry={"h": "h"})
        >>> graph.result(words.last("h"))
        >>> graph.num_nodes
        3
    """

    def __init__(self, layout: Layout, *, max_nodes: int = 4096) -> None:
        self.layout = layout
        self.max_nodes = max_nodes
        self.num_nodes = 0
        self.constants: list[list[NDArray[np.generic]]] = [[] for _ in layout.banks]  # by bank, in order of their rows
        self._num_constants = [0] * len(layout.banks)
        self._cells: list[NDArray[np.int64]] = []
        self._codes: list[Codes] = []
        self._results: list[NDArray[np.int64]] = []

    def add(self, cell: str, inputs: Mapping[str, Wire | ArrayLike]) -> int:
        """Add one node; an input that is not named reads zeros.

        Args:
            cell: which.
            inputs: a wire from any node, or one row of numbers.

        Returns:
            The node's number.

        Raises:
            InvalidInputError: there is no such cell or input, the numbers do not fit it, or nodes are too many.
        """
        number, codes = self._new(cell, 1)
        for name, value in inputs.items():
            codes[0, self._input(number, name)] = self._code(number, name, value)
        return self._keep(number, codes)

    def add_many(
        self,
        cell: str,
        count: int,
        *,
        each: Mapping[str, ArrayLike] | None = None,
        wires: Mapping[str, tuple[Sequence[int] | NDArray[np.int64], str]] | None = None,
    ) -> int:
        """Add ``count`` nodes at once.

        Args:
            cell: which.
            count: how many.
            each: by input, rows [count, ...], one for each node.
            wires: by input, the nodes [count] that feed it, and which output of theirs. They may come later.

        Returns:
            The first node's number; the others follow.

        Raises:
            InvalidInputError: as :meth:`add`, or there are not ``count`` of something.
        """
        number, codes = self._new(cell, count)
        for name, rows in (each or {}).items():
            codes[:, self._input(number, name)] = self._constant_codes(number, name, rows, count)
        for name, (nodes, output) in (wires or {}).items():
            sources = np.asarray(nodes, dtype=np.int64)
            if sources.shape != (count,):
                raise InvalidInputError(f"{cell}.{name}: {count} nodes must feed it, got {sources.shape}")
            codes[:, self._input(number, name)] = self._wire_codes(sources, output)
        return self._keep(number, codes)

    def chain(
        self,
        cell: str,
        length: int,
        *,
        each: Mapping[str, ArrayLike] | None = None,
        carry: Mapping[str, str],
        first: Mapping[str, Wire | ArrayLike] | None = None,
    ) -> Chain:
        """Add ``length`` nodes, each fed by the one before.

        A decoder whose length nobody knows is a chain of its greatest length, of a cell with a ``stop``: it ends early
        at the step that gives the stop's value.

        Args:
            cell: which.
            length: number of nodes.
            each: by input, rows [length, ...], one for each node.
            carry: input -> output of the node before.
            first: what the first node's carried inputs read instead; zeros if not named.

        Raises:
            InvalidInputError: as :meth:`add`.
        """
        number, codes = self._new(cell, length)
        for name, rows in (each or {}).items():
            codes[:, self._input(number, name)] = self._constant_codes(number, name, rows, length)
        before = np.arange(self.num_nodes, self.num_nodes + length - 1)
        spec = self.layout.cells[number]
        for name, output in carry.items():
            index = self._input(number, name)
            codes[1:, index] = 1 + before * self.layout.num_outputs + spec.output_index(output)
        for name, value in (first or {}).items():
            codes[0, self._input(number, name)] = self._code(number, name, value)
        return Chain(self._keep(number, codes), length)

    def result(self, what: Wire | Chain | int) -> None:
        """The request gets the results (``CellSpec.results``) of a node, or of every node of a chain."""
        if isinstance(what, Chain):
            nodes = np.arange(what.start, what.start + what.length)
        else:
            nodes = np.array([what.node if isinstance(what, Wire) else what])
        if nodes[0] < 0 or nodes[-1] >= self.num_nodes:
            raise InvalidInputError(f"a result is asked of node {nodes[-1]}: there are {self.num_nodes} nodes")
        self._results.append(nodes)

    def structure(self) -> tuple[NDArray[np.int64], Codes, NDArray[np.int64]]:
        """Cell numbers [n], codes [n, num_inputs], and the nodes that give results, in the order asked for."""
        if not self._cells:
            raise InvalidInputError("the request's cell graph is empty: it needs at least one node")
        if not self._results:
            raise InvalidInputError("the request's cell graph gives no result: ask for one with result()")
        return np.concatenate(self._cells), np.concatenate(self._codes), np.concatenate(self._results)

    def _new(self, cell: str, count: int) -> tuple[int, Codes]:
        number = self.layout.cell_number(cell)
        if count < 1:
            raise InvalidInputError(f"{cell}: at least one node is needed, got {count}")
        if self.num_nodes + count > self.max_nodes:
            raise InvalidInputError(
                f"the request unfolds to {self.num_nodes + count} cells or more: at most {self.max_nodes} are served"
            )
        return number, np.zeros((count, self.layout.num_inputs), dtype=np.int64)

    def _keep(self, number: int, codes: Codes) -> int:
        start = self.num_nodes
        self._cells.append(np.full(len(codes), number, dtype=np.int64))
        self._codes.append(codes)
        self.num_nodes += len(codes)
        return start

    def _input(self, number: int, name: str) -> int:
        return self.layout.cells[number].input_index(name)

    def _code(self, number: int, name: str, value: Wire | ArrayLike) -> int:
        if isinstance(value, Wire):
            return int(self._wire_codes(np.array([value.node]), value.output)[0])
        return int(self._constant_codes(number, name, np.asarray(value)[None], 1)[0])

    def _wire_codes(self, nodes: NDArray[np.int64], output: str) -> Codes:
        """Codes of wires; nodes that are added later are checked by the planner."""
        number = self._number_of_output(nodes, output)
        return 1 + nodes * self.layout.num_outputs + number

    def _number_of_output(self, nodes: NDArray[np.int64], output: str) -> NDArray[np.int64]:
        """Where ``output`` stands among the outputs of each node's cell, or of the only cell that has it."""
        places = self.layout.places_of_output(output)
        if len(set(places.values())) == 1:
            return np.full(len(nodes), next(iter(places.values())), dtype=np.int64)
        known = np.concatenate([*self._cells, np.empty(0, dtype=np.int64)])
        at_last = next(reversed(places.values()))  # of nodes to come: the planner checks that it fits
        cells = [int(known[node]) if 0 <= node < len(known) else None for node in nodes.tolist()]
        return np.array([at_last if cell is None else places.get(cell, at_last) for cell in cells], dtype=np.int64)

    def _constant_codes(self, number: int, name: str, rows: ArrayLike, count: int) -> Codes:
        port = self.layout.cells[number].inputs[self._input(number, name)]
        checked = port.check(np.asarray(rows))
        if len(checked) != count:
            raise InvalidInputError(f"{name}: {count} rows are needed, one for each node, got {len(checked)}")
        bank = int(self.layout.input_banks[number, self._input(number, name)])
        start = self._num_constants[bank]
        self._num_constants[bank] += count
        self.constants[bank].append(checked)
        return -1 - np.arange(start, start + count)
