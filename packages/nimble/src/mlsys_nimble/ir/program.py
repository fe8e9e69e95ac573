"""The program: typed operators over numbered values, between capture and the executors.

Shapes and dimensions are torch's own (logical: images are N, C, H, W); where a value lies in memory, and in which
order of dimensions, is the memory plan's business. Values are never written twice: what a model changes in place is a
new value here, and :attr:`Program.mutations` says which buffer it goes back to.

No torch: constants are opaque to everything but the passes and executors that use them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

from mlsys_core.graphs import Graph, new_graph
from mlsys_nimble.ir.graph import OperatorGraph
from mlsys_nimble.ir.operators import Kind

ValueId: TypeAlias = int

ITEMSIZE = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}


@dataclass(frozen=True, slots=True)
class ValueType:
    """Shape and dtype of a value, known ahead of time."""

    shape: tuple[int, ...]  # logical; () for a scalar tensor, 0 allowed
    dtype: str  # torch's name: a key of ITEMSIZE

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Return the size of an element in bytes."""
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Return the size in bytes, without padding."""
        return self.numel * self.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Operator:
    """One step of a program: its kind, the values that it reads and those that it makes."""

    name: str  # unique in its program; a fused operator has the name of its main part
    kind: Kind
    inputs: tuple[ValueId, ...]  # order: the kind's docstring
    outputs: tuple[ValueId, ...]  # one, but for Aten operators with several results
    source: str = ""  # line of the model, "net.py:12, in forward: x = self.conv(x)"; for messages


@dataclass(frozen=True, slots=True)
class Program:
    """Whole model for one set of input shapes."""

    values: Sequence[ValueType]  # type by ValueId
    operators: tuple[Operator, ...]  # topological order
    inputs: tuple[ValueId, ...]  # tensors of a call, in flattened order
    outputs: tuple[ValueId, ...]  # an input or constant (as a call leaves it), or one value twice, may be among them
    constants: Mapping[ValueId, Any] = field(default_factory=dict)  # torch tensors: parameters, buffers, folded results
    mutations: tuple[tuple[ValueId, ValueId], ...] = ()  # (constant or input, the value it holds after a call)

    def producers(self) -> dict[ValueId, int]:
        """Return the index of the operator that makes each value; inputs and constants have none."""
        return {value: index for index, operator in enumerate(self.operators) for value in operator.outputs}

    def consumers(self) -> dict[ValueId, list[int]]:
        """Return the indices of the operators that read each value, ascending, each once."""
        readers: dict[ValueId, list[int]] = {}
        for index, operator in enumerate(self.operators):
            for value in dict.fromkeys(operator.inputs):
                readers.setdefault(value, []).append(index)
        return readers

    def kept(self) -> frozenset[ValueId]:
        """Return the values that must outlive the last operator: results, and what goes back to buffers."""
        return frozenset(self.outputs) | {new for _, new in self.mutations}

    def graph(self) -> OperatorGraph:
        """Return the graph of operators and their dependencies, for the stream assignment."""
        producers = self.producers()
        pairs = {
            (producers[value], index)
            for index, operator in enumerate(self.operators)
            for value in operator.inputs
            if value in producers
        }
        return OperatorGraph(names=tuple(operator.name for operator in self.operators), edges=tuple(sorted(pairs)))

    def to_networkx(self) -> Graph:
        """Return its operators as a graph whose edges are the tensors that flow.

        Nodes have ``kind``, ``shape`` ("1x64x56x56"), ``dtype`` and ``nbytes`` of what they make (shapes and dtypes of
        several results with commas) and ``source``, where the model asks for it; edges have ``nbytes``.
        """
        graph = new_graph("program", color="kind")
        producers = self.producers()
        for operator in self.operators:
            made = [self.values[value] for value in operator.outputs]
            graph.add_node(
                operator.name,
                kind=type(operator.kind).__name__,
                shape=", ".join("x".join(map(str, value.shape)) for value in made),
                dtype=", ".join(value.dtype for value in made),
                nbytes=sum(value.nbytes for value in made),
                source=operator.source,
            )
            for value in dict.fromkeys(operator.inputs):
                if value in producers:
                    edge = self.operators[producers[value]].name, operator.name
                    before = graph.edges[edge]["nbytes"] if graph.has_edge(*edge) else 0
                    graph.add_edge(*edge, nbytes=before + self.values[value].nbytes)
        return graph

    def lines(self) -> Iterator[str]:
        """Yield the program as text, one operator a line."""
        for value in self.inputs:
            yield f"%{value}: {self.values[value]} = input"
        for operator in self.operators:
            results = ", ".join(f"%{value}: {self.values[value]}" for value in operator.outputs)
            arguments = ", ".join(f"%{value}" for value in operator.inputs)
            yield f"{results} = {operator.kind}({arguments})  # {operator.name}"
        yield f"return {', '.join(f'%{value}' for value in self.outputs)}"

    def __str__(self) -> str:
        return "\n".join(self.lines())


def check_program(program: Program) -> None:
    """Assert the invariants of every program; the tests of capture and of each pass call it."""
    known = set(program.inputs) | set(program.constants)
    assert len(known) == len(program.inputs) + len(program.constants), "a value is an input twice, or also a constant"
    names: set[str] = set()
    for operator in program.operators:
        assert operator.name not in names, f"two operators are called {operator.name}"
        names.add(operator.name)
        assert known.issuperset(operator.inputs), f"{operator.name} reads what is not yet there: {operator.inputs}"
        assert known.isdisjoint(operator.outputs), f"{operator.name} makes a value that exists: {operator.outputs}"
        known.update(operator.outputs)
    assert known.issuperset(program.kept()), "a result that nothing makes"
    assert all(0 <= value < len(program.values) for value in known), "a value without a type"
