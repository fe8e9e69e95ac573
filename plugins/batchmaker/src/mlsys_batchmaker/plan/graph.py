"""The cell graph of one request: nodes are cells, edges are data flow (BatchMaker, section 3.1).

A model's ``unfold`` builds one with :meth:`CellGraph.add`, :meth:`CellGraph.add_many` and :meth:`CellGraph.chain`.
Structure (which cell, what feeds it) and constants (the request's own numbers) are kept apart, so that what the planner
makes of a structure is made once for all requests that share it; until then a structure is what was asked for, not yet
numbers for each node.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from mlsys_core.errors import InvalidInputError
from mlsys_core.graphs import Graph, new_graph
from numpy.typing import ArrayLike, NDArray

from mlsys_batchmaker.plan.layout import Layout
from mlsys_batchmaker.plan.spec import Port
from mlsys_batchmaker.plan.structure import CODES, Codes, expand, pack_part, pack_structure, require_nodes


@dataclass(frozen=True, slots=True)
class Wire:
    """One output of one node."""

    node: int
    output: str


Wires: TypeAlias = "tuple[Sequence[int] | NDArray[np.int64], str] | Wire"  # nodes and an output; or one for all


@dataclass(frozen=True, slots=True)
class Chain:
    """Nodes of one cell, each fed by the one before; see :meth:`CellGraph.chain`."""

    start: int  # its first node
    length: int

    def last(self, output: str) -> Wire:
        """Return that output of its last node."""
        return Wire(self.start + self.length - 1, output)


class CellGraph:
    """A cell graph under construction.

    Args:
        layout: layout of the model's cells.
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
        self.given: list[tuple[int, int, Port]] = []  # rows given by ``each``: bank, index in its list, port
        self._num_constants = [0] * len(layout.banks)
        self._parts: list[bytes] = []
        self._starts: list[int] = []  # by part: its first node
        self._cells: list[int] = []  # by part
        self._results: list[tuple[int, int]] = []  # (first node, one above the last)

    def add(self, cell: str, inputs: Mapping[str, Wire | ArrayLike]) -> int:
        """Add one node; an input that is not named reads zeros.

        Args:
            cell: name of the cell.
            inputs: a wire from any node, or one row of numbers.

        Returns:
            The node's number.

        Raises:
            InvalidInputError: there is no such cell or input, the numbers do not fit it, or nodes are too many.
        """
        number = self._number(cell, 1)
        return self._keep(number, 1, pack_part(number, 1, first=self._first(number, inputs)))

    def add_many(
        self,
        cell: str,
        count: int,
        *,
        each: Mapping[str, ArrayLike] | None = None,
        wires: Mapping[str, Wires] | None = None,
    ) -> int:
        """Add ``count`` nodes at once.

        Args:
            cell: name of the cell.
            count: number of nodes.
            each: by input, rows [count, ...], one for each node.
            wires: by input, the nodes [count] that feed it, and which output of theirs; a wire feeds all. The nodes may
                come later.

        Returns:
            The first node's number; the others follow.

        Raises:
            InvalidInputError: as :meth:`add`, or there are not ``count`` of something.
        """
        number = self._number(cell, count)
        constants, wired = self._each(number, each, count), self._wired(number, wires, count)
        return self._keep(number, count, pack_part(number, count, each=constants, wired=wired))

    def chain(
        self,
        cell: str,
        length: int,
        *,
        each: Mapping[str, ArrayLike] | None = None,
        wires: Mapping[str, Wires] | None = None,
        carry: Mapping[str, str],
        first: Mapping[str, Wire | ArrayLike] | None = None,
    ) -> Chain:
        """Add ``length`` nodes, each fed by the one before.

        A decoder whose length nobody knows is a chain of its greatest length, of a cell with a ``stop``: it ends early
        at the step that gives the stop's value.

        Args:
            cell: name of the cell.
            length: number of nodes.
            each: by input, rows [length, ...], one for each node.
            wires: by input, as of :meth:`add_many`.
            carry: input -> output of the node before.
            first: values that the first node's carried inputs read instead; zeros if not named.

        Raises:
            InvalidInputError: as :meth:`add`.
        """
        number = self._number(cell, length)
        constants = self._each(number, each, length)
        spec = self.layout.cells[number]
        index_of = self.layout.input_index
        carried = [(index_of(number, name), spec.output_index(output)) for name, output in carry.items()]
        begins = self._first(number, first) if first else []
        wired = self._wired(number, wires, length)
        part = pack_part(number, length, each=constants, carried=carried, first=begins, wired=wired)
        return Chain(self._keep(number, length, part), length)

    def result(self, what: Wire | Chain | int) -> None:
        """Give the request the results (``CellSpec.results``) of a node, or of every node of a chain."""
        if isinstance(what, Chain):
            first, stop = what.start, what.start + what.length
        else:
            first = what.node if isinstance(what, Wire) else int(what)
            stop = first + 1
        if first < 0 or stop > self.num_nodes:
            raise InvalidInputError(f"a result is asked of node {stop - 1}: there are {self.num_nodes} nodes")
        self._results.append((first, stop))

    def cell_of_result(self) -> int:
        """Return the cell type, by number, of the node whose result was asked for last.

        Raises:
            InvalidInputError: no result is asked for.
        """
        if not self._results:
            raise InvalidInputError("the request's cell graph gives no result: ask for one with result()")
        return self._cells[bisect_right(self._starts, self._results[-1][0]) - 1]

    def structure(self) -> bytes:
        """Return bytes that are equal for graphs of one structure; see :mod:`mlsys_batchmaker.plan.structure`.

        Raises:
            InvalidInputError: there is no node, or no result is asked for.
        """
        if not self._parts:
            raise InvalidInputError("the request's cell graph is empty: it needs at least one node")
        if not self._results:
            raise InvalidInputError("the request's cell graph gives no result: ask for one with result()")
        return pack_structure(self.num_nodes, self._parts, self._results, must_connect=self.must_connect)

    def to_networkx(self) -> Graph:
        """Return the cells, named by their numbers; edges are the rows that flow. The planner must take the graph.

        Nodes have ``cell`` (the type), ``priority``, ``phase`` (the most changes of type on a path to the cell; a
        subgraph is connected cells of one type and phase), ``constants`` (inputs of the request's own, with commas) and
        ``is_result``; edges have ``wires`` ("h -> h_left, c -> c_left") and ``nbytes``.

        Raises:
            InvalidInputError: as :meth:`structure`, or a wire comes from a node that there is not.
        """
        return drawn(self.layout, self.structure())

    def _number(self, cell: str, count: int) -> int:
        number = self.layout.cell_number(cell)
        if count < 1:
            raise InvalidInputError(f"{cell}: at least one node is needed, got {count}")
        if self.num_nodes + count > self.max_nodes:
            raise InvalidInputError(
                f"the request unfolds to {self.num_nodes + count} cells or more: at most {self.max_nodes} are served"
            )
        return number

    def _keep(self, number: int, size: int, part: bytes) -> int:
        start = self.num_nodes
        self._parts.append(part)
        self._starts.append(start)
        self._cells.append(number)
        self.num_nodes += size
        return start

    def _first(self, number: int, inputs: Mapping[str, Wire | ArrayLike]) -> list[tuple[int, int]]:
        """Return the sources of one node's inputs: (input, code)."""
        index_of = self.layout.input_index
        return [(at := index_of(number, name), self._code(number, at, value)) for name, value in inputs.items()]

    def _code(self, number: int, input_index: int, value: Wire | ArrayLike) -> int:
        if isinstance(value, Wire):
            if not 0 <= value.node < self.max_nodes:
                raise InvalidInputError(f"a cell is wired to node {value.node}: there are {self.num_nodes} nodes")
            return 1 + value.node * self.layout.num_outputs + self._output_index(value.node, value.output)
        return -1 - self._constants(number, input_index, np.asarray(value)[None], 1)

    def _wired(self, number: int, wires: Mapping[str, Wires] | None, count: int) -> list[tuple[int, int, bytes]]:
        """Return what feeds the inputs of ``count`` nodes: (input, output or ``CODES``, nodes or codes)."""
        found = []
        for name, given in (wires or {}).items():
            nodes, output = ([given.node] * count, given.output) if isinstance(given, Wire) else given
            sources = np.asarray(nodes, dtype=np.int64)
            if sources.shape != (count,):
                cell = self.layout.cells[number].name
                raise InvalidInputError(f"{cell}.{name}: {count} nodes must feed it, got {sources.shape}")
            input_index = self.layout.input_index(number, name)
            only = self.layout.only_output_index(output)
            if only is None:
                found.append((input_index, CODES, self._wire_codes(sources, output).tobytes()))
            else:
                found.append((input_index, only, sources.tobytes()))
        return found

    def _wire_codes(self, nodes: NDArray[np.int64], output: str) -> Codes:
        """Return codes of wires; the planner checks nodes that are added later."""
        require_nodes(nodes, self.max_nodes)
        numbers = np.array([self._output_index(node, output) for node in nodes.tolist()], dtype=np.int64)
        return 1 + nodes * self.layout.num_outputs + numbers

    def _output_index(self, node: int, output: str) -> int:
        """Return the index of ``output`` among the outputs of a node's cell, or of the last cell that has it."""
        indices = self.layout.output_indices(output)
        at_last = next(reversed(indices.values()))  # index for nodes to come; the planner checks that it fits
        if not 0 <= node < self.num_nodes:
            return at_last
        return indices.get(self._cells[bisect_right(self._starts, node) - 1], at_last)

    def _each(self, number: int, each: Mapping[str, ArrayLike] | None, count: int) -> list[tuple[int, int]]:
        """Take the rows of each input; returns (input, first row)."""
        found: list[tuple[int, int]] = []
        for name, rows in (each or {}).items():
            input_index = self.layout.input_index(number, name)
            bank = self.layout.bank_of_input[number][input_index]
            self.given.append((bank, len(self.constants[bank]), self.layout.cells[number].inputs[input_index]))
            found.append((input_index, self._constants(number, input_index, rows, count)))
        return found

    def _constants(self, number: int, input_index: int, rows: ArrayLike, count: int) -> int:
        """Take the rows of an input; returns the first one's number."""
        bank = self.layout.bank_of_input[number][input_index]
        self.constants[bank].append(self.layout.cells[number].inputs[input_index].check(np.asarray(rows), count))
        first: int = self._num_constants[bank]
        self._num_constants[bank] += count
        return first


def drawn(layout: Layout, structure: bytes) -> Graph:
    """Return the cells of a structure, named by their numbers; see :meth:`.graph.CellGraph.to_networkx`.

    Raises:
        InvalidInputError: A wire comes from a node that there is not.
    """
    import networkx as nx

    cells, codes, asked = expand(layout, structure)
    specs = [layout.cells[number] for number in cells.tolist()]
    results = set(asked.tolist())
    graph = new_graph("cells of a request", color="cell")
    for node, spec in enumerate(specs):
        fed = list(zip(spec.inputs, codes[node].tolist(), strict=False))  # codes are padded to the widest cell
        graph.add_node(
            str(node),
            label=f"{spec.name} {node}",
            cell=spec.name,
            priority=spec.priority,
            constants=", ".join(port.name for port, code in fed if code < 0),
            is_result=node in results,
        )
        for port, code in fed:
            if code > 0:
                source, output = divmod(code - 1, layout.num_outputs)
                edge = str(source), str(node)
                known = graph.edges[edge] if graph.has_edge(*edge) else {"wires": "", "nbytes": 0}
                wire = f"{specs[source].outputs[output].name} -> {port.name}"
                wires = f"{known['wires']}, {wire}" if known["wires"] else wire
                graph.add_edge(*edge, wires=wires, nbytes=known["nbytes"] + port.nbytes)
    phases: dict[str, int] = {}
    for name in nx.topological_sort(graph):
        cell = graph.nodes[name]["cell"]
        before = graph.predecessors(name)
        phases[name] = max((phases[one] + (graph.nodes[one]["cell"] != cell) for one in before), default=0)
    nx.set_node_attributes(graph, phases, "phase")
    return graph
