"""The cell graph of one request: nodes are cells, edges are data flow (BatchMaker, section 3.1).

A model's ``unfold`` builds one with :meth:`CellGraph.add`, :meth:`CellGraph.add_many` and :meth:`CellGraph.chain`.
Structure (which cell, what feeds it) and constants (the request's own numbers) are kept apart, so that what the planner
makes of a structure is made once for all requests that share it; until then a structure is what was asked for, not yet
numbers for each node.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

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
        must_connect: all nodes must hang together; those that a request grows by later need not.

    Example:
        >>> from mlsys_batchmaker.plan.spec import CellSpec, Port
        >>> h = Port("h", "float32", (4,))
        >>> graph = CellGraph(Layout([CellSpec("rnn", (Port("token", "int64", high=9), h), (h,))]))
        >>> words = graph.chain("rnn", 3, each={"token": [5, 1, 2]}, carry={"h": "h"})
        >>> graph.result(words.last("h"))
        >>> graph.num_nodes
        3
    """

    def __init__(self, layout: Layout, *, max_nodes: int = 4096, must_connect: bool = True) -> None:
        self.layout = layout
        self.must_connect = must_connect
        self.max_nodes = max_nodes
        self.num_nodes = 0
        self.constants: list[list[NDArray[np.generic]]] = [[] for _ in layout.banks]  # by bank, in order of their rows
        self._num_constants = [0] * len(layout.banks)
        self._parts: list[_Part] = []
        self._starts: list[int] = []  # by part: its first node
        self._results: list[tuple[int, int]] = []  # (first node, one above the last)

    @property
    def key(self) -> Hashable:
        """Equal for graphs of one structure."""
        return tuple(self._parts), tuple(self._results), self.must_connect

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
        number = self._number(cell, 1)
        return self._keep(_Part(number, 1, first=self._first(number, inputs)))

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
        number = self._number(cell, count)
        constants = self._constants(number, each, count)
        arrays = []
        for name, (nodes, output) in (wires or {}).items():
            sources = np.asarray(nodes, dtype=np.int64)
            if sources.shape != (count,):
                raise InvalidInputError(f"{cell}.{name}: {count} nodes must feed it, got {sources.shape}")
            arrays.append((self.layout.input_place(number, name), self._wire_codes(sources, output).tobytes()))
        return self._keep(_Part(number, count, constants, arrays=tuple(arrays)))

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
        number = self._number(cell, length)
        constants = self._constants(number, each, length)
        spec = self.layout.cells[number]
        place = self.layout.input_place
        carried = tuple([(place(number, name), spec.output_index(output)) for name, output in carry.items()])
        begins = self._first(number, first) if first else ()
        return Chain(self._keep(_Part(number, length, constants, carried, begins)), length)

    def result(self, what: Wire | Chain | int) -> None:
        """The request gets the results (``CellSpec.results``) of a node, or of every node of a chain."""
        if isinstance(what, Chain):
            first, stop = what.start, what.start + what.length
        else:
            first = what.node if isinstance(what, Wire) else int(what)
            stop = first + 1
        if first < 0 or stop > self.num_nodes:
            raise InvalidInputError(f"a result is asked of node {stop - 1}: there are {self.num_nodes} nodes")
        self._results.append((first, stop))

    def structure(self) -> tuple[NDArray[np.int64], Codes, NDArray[np.int64]]:
        """Cell numbers [n], codes [n, num_inputs], and the nodes that give results, in the order asked for."""
        if not self._parts:
            raise InvalidInputError("the request's cell graph is empty: it needs at least one node")
        if not self._results:
            raise InvalidInputError("the request's cell graph gives no result: ask for one with result()")
        codes = np.zeros((self.num_nodes, self.layout.num_inputs), dtype=np.int64)
        for part, start in zip(self._parts, self._starts, strict=True):
            part.write(codes[start : start + part.size], start, self.layout.num_outputs)
        cells = np.empty(self.num_nodes, dtype=np.int64)
        for part, start in zip(self._parts, self._starts, strict=True):
            cells[start : start + part.size] = part.cell
        results = [node for first, stop in self._results for node in range(first, stop)]
        return cells, codes, np.array(results, dtype=np.int64)

    def _number(self, cell: str, count: int) -> int:
        number = self.layout.cell_number(cell)
        if count < 1:
            raise InvalidInputError(f"{cell}: at least one node is needed, got {count}")
        if self.num_nodes + count > self.max_nodes:
            raise InvalidInputError(
                f"the request unfolds to {self.num_nodes + count} cells or more: at most {self.max_nodes} are served"
            )
        return number

    def _keep(self, part: _Part) -> int:
        start = self.num_nodes
        self._parts.append(part)
        self._starts.append(start)
        self.num_nodes += part.size
        return start

    def _first(self, number: int, inputs: Mapping[str, Wire | ArrayLike]) -> tuple[tuple[int, int], ...]:
        """What feeds one node: (input, code)."""
        place = self.layout.input_place
        return tuple([(place(number, name), self._code(number, name, value)) for name, value in inputs.items()])

    def _code(self, number: int, name: str, value: Wire | ArrayLike) -> int:
        if isinstance(value, Wire):
            return 1 + value.node * self.layout.num_outputs + self._place_of_output(value.node, value.output)
        ((_, row),) = self._constants(number, {name: np.asarray(value)[None]}, 1)
        return -1 - row

    def _wire_codes(self, nodes: NDArray[np.int64], output: str) -> Codes:
        """Codes of wires; nodes that are added later are checked by the planner."""
        places = self.layout.places_of_output(output)
        if len(set(places.values())) == 1:
            return nodes * self.layout.num_outputs + (1 + next(iter(places.values())))
        numbers = np.array([self._place_of_output(node, output) for node in nodes.tolist()], dtype=np.int64)
        return 1 + nodes * self.layout.num_outputs + numbers

    def _place_of_output(self, node: int, output: str) -> int:
        """Where ``output`` stands among the outputs of a node's cell, or of the last cell that has it."""
        places = self.layout.places_of_output(output)
        at_last = next(reversed(places.values()))  # of nodes to come: the planner checks that it fits
        if not 0 <= node < self.num_nodes:
            return at_last
        return places.get(self._parts[bisect_right(self._starts, node) - 1].cell, at_last)

    def _constants(self, number: int, each: Mapping[str, ArrayLike] | None, count: int) -> tuple[tuple[int, int], ...]:
        """Take the rows of each input; returns (input, first row)."""
        found = []
        for name, rows in (each or {}).items():
            index = self.layout.input_place(number, name)
            checked = self.layout.cells[number].inputs[index].check(np.asarray(rows))
            if len(checked) != count:
                raise InvalidInputError(f"{name}: {count} rows are needed, one for each node, got {len(checked)}")
            bank = self.layout.bank_of_input[number][index]
            found.append((index, self._num_constants[bank]))
            self._num_constants[bank] += count
            self.constants[bank].append(checked)
        return tuple(found)


class _Part(NamedTuple):
    """Nodes added at once. Hashable: plans are found by it."""

    cell: int
    size: int  # nodes
    each: tuple[tuple[int, int], ...] = ()  # (input, first row of its constants)
    carried: tuple[tuple[int, int], ...] = ()  # (input, output of the node before)
    first: tuple[tuple[int, int], ...] = ()  # (input, code of the first node)
    arrays: tuple[tuple[int, bytes], ...] = ()  # (input, codes)

    def write(self, codes: Codes, start: int, num_outputs: int) -> None:
        """Write the codes [count, inputs] of its nodes, the first of which has the number ``start``."""
        for index, row in self.each:
            codes[:, index] = -1 - np.arange(row, row + self.size)
        if self.carried:
            before = np.arange(start, start + self.size - 1) * num_outputs
            for index, output in self.carried:
                codes[1:, index] = before + (1 + output)
        for index, code in self.first:
            codes[0, index] = code
        for index, array in self.arrays:
            codes[:, index] = np.frombuffer(array, dtype=np.int64)
