"""A model: its cells, and how a request unfolds into a graph of them (BatchMaker, section 4.1)."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from mlsys_core.errors import InvalidInputError
from mlsys_core.graphs import Graph
from numpy.typing import ArrayLike, NDArray

from mlsys_batchmaker.cells.cell import Cell
from mlsys_batchmaker.plan import CellGraph, GraphPlan, Layout, Planner, Port
from mlsys_batchmaker.scheduling.requests import Constants, Grow, Values

_MAX_FORMS = 4096
Payload: TypeAlias = Mapping[str, NDArray[np.generic]]  # a request's tensors by name


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that a request brings or gets."""

    name: str
    dtype: str  # as in numpy
    shape: tuple[int, ...]  # -1: any size
    is_optional: bool = False  # True: a request may leave it out


class Architecture(Protocol):
    """Requests and answers of a model; its cells compute what lies between."""

    name: str  # in the manifest
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    def unfold(self, request: Payload, graph: CellGraph) -> None:
        """Add the request's cells to ``graph`` and ask for its results.

        Raises:
            InvalidInputError: the request makes no sense; it alone is refused.
        """
        ...

    def finish(self, request: Payload, values: Sequence[Values]) -> Payload:
        """Return the answer for the results of the nodes, in the order they were asked for."""
        ...

    def example(self) -> Payload:
        """Return a small request, to try the model with."""
        ...

    def config(self) -> Mapping[str, Any]:
        """Return the arguments that make this architecture again, as JSON."""
        ...


@runtime_checkable
class Grows(Protocol):
    """An architecture whose next cells depend on what earlier ones gave, as a beam search's do (section 4.2)."""

    def extend(self, request: Payload, parts: Sequence[Sequence[Values]], graph: CellGraph) -> bool:
        """Add the next cells to ``graph`` and ask for their results; False: the request is done.

        Called in the loop's thread when all cells added so far are computed, so it should be quick. What the new cells
        need of earlier ones are constants, taken from their results.

        Args:
            request: its tensors.
            parts: results of ``unfold``'s cells, then of each call's, in the order asked for.
            graph: empty.

        Raises:
            InvalidInputError: the request fails with it.
        """
        ...


@runtime_checkable
class Alike(Protocol):
    """An architecture that says which requests unfold alike, so that only the first of them is unfolded."""

    def structure_key(self, request: Payload) -> tuple[Hashable, Sequence[ArrayLike]]:
        """Return a key of the request's structure, and the request's own rows.

        Requests of equal keys unfold to one structure with equal constants, but for the rows that ``unfold`` names as
        ``each`` of a chain or of nodes; those are given here, in the same order.

        Raises:
            InvalidInputError: the request makes no sense; it alone is refused.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """Plan and constants that requests of one key share."""

    plan: GraphPlan
    constants: list[list[NDArray[np.generic]]]  # constants of the first request
    given: list[tuple[int, int, Port]]  # constants that differ by request: bank, index, port

    def fill(self, rows: Sequence[ArrayLike]) -> list[list[NDArray[np.generic]]]:
        """Return the constants with the rows of another request in place of the first one's."""
        constants = [own.copy() for own in self.constants]
        for (bank, index, port), own in zip(self.given, rows, strict=True):
            constants[bank][index] = port.check(np.asarray(own), len(constants[bank][index]))
        return constants


@dataclass(frozen=True, slots=True, eq=False)
class Unfolded:
    """A request as the scheduler takes it."""

    plan: GraphPlan
    constants: list[list[NDArray[np.generic]]]
    grow: Grow | None = None


class Model:
    """Cells and an architecture.

    Args:
        name: name of the model.
        cells: types by name; two of equal identity are one type, whatever they are called.
        architecture: unfolds and finishes.
        max_cells: most cells of a request; larger ones are refused.

    Raises:
        InvalidInputError: cell names are not unique, a cell mixes rows, or the architecture's example does not unfold.
    """

    def __init__(self, name: str, cells: Sequence[Cell], architecture: Architecture, *, max_cells: int = 4096) -> None:
        self.name = name
        self.cells = tuple(cells)
        for cell in self.cells:
            cell.require_batchable()
        self.architecture = architecture
        self.max_cells = max_cells
        self.layout = Layout([cell.spec for cell in self.cells])
        self._merge_equal_types()
        self._planner = Planner(self.layout)
        self._grows = architecture if isinstance(architecture, Grows) else None  # asking it of a protocol is slow
        self._alike = architecture if isinstance(architecture, Alike) else None
        self._forms: dict[Hashable, _Form] = {}
        self._planning = threading.Lock()
        try:
            self.unfold(architecture.example())
        except InvalidInputError as error:
            raise InvalidInputError(f"model {name!r}: its own example request does not unfold: {error}") from error

    def unfold(self, request: Payload, *, max_cells: int | None = None) -> Unfolded:
        """Unfold the request into a planned cell graph; any thread may call this.

        Args:
            request: Its tensors.
            max_cells: Most cells of it; None: the model's own limit.

        Raises:
            InvalidInputError: the request is not acceptable: see the message.
        """
        most = self.max_cells if max_cells is None else max_cells
        if self._alike is None:
            plan, graph = self._unfold(request, most)
            constants = graph.constants
        else:
            key, rows = self._alike.structure_key(request)
            form = self._forms.get(key)
            if form is None:
                form = self._learn(request, key, rows, most)
            plan, constants = form.plan, form.fill(rows)
        if self._grows is None:
            return Unfolded(plan, constants)
        return Unfolded(plan, constants, self._grow(request, self._grows, plan.num_nodes, most))

    def to_networkx(self, request: Payload | None = None) -> Graph:
        """Return the cell graph of a request; see :meth:`mlsys_batchmaker.plan.graph.CellGraph.to_networkx`.

        Of a model that grows, these are the cells that a request begins with.

        Args:
            request: Its tensors; None: the architecture's example.

        Raises:
            InvalidInputError: the request is not acceptable: see the message.
        """
        _, graph = self._unfold(self.architecture.example() if request is None else request, self.max_cells)
        return graph.to_networkx()

    def _unfold(self, request: Payload, max_cells: int) -> tuple[GraphPlan, CellGraph]:
        graph = CellGraph(self.layout, max_nodes=max_cells)
        self.architecture.unfold(request, graph)
        with self._planning:
            return self._planner.plan(graph), graph

    def _learn(self, request: Payload, key: Hashable, rows: Sequence[ArrayLike], max_cells: int) -> _Form:
        """Make the form of the first request of a key."""
        plan, graph = self._unfold(request, max_cells)
        own = [graph.constants[bank][index] for bank, index, _ in graph.given]
        if len(own) != len(rows) or not all(a is b or np.array_equal(a, b) for a, b in zip(own, rows, strict=True)):
            raise InvalidInputError(
                f"structure_key() of {self.architecture.name!r} gives other rows than unfold() names as `each`: "
                f"{len(rows)} arrays for {len(own)}, which must be equal and in the same order"
            )
        form = _Form(plan, graph.constants, graph.given)
        with self._planning:
            self._forms[key] = form
            if len(self._forms) > _MAX_FORMS:
                del self._forms[next(iter(self._forms))]
        return form

    def _grow(self, request: Payload, architecture: Grows, num_nodes: int, max_cells: int) -> Grow:
        def grow(parts: Sequence[Sequence[Values]]) -> tuple[GraphPlan, Constants] | None:
            nonlocal num_nodes
            graph = CellGraph(self.layout, max_nodes=max_cells - num_nodes, must_connect=False)
            if not architecture.extend(request, parts, graph):
                return None
            num_nodes += graph.num_nodes
            with self._planning:
                return self._planner.plan(graph), graph.constants

        return grow

    def forget_plans(self) -> None:
        """Forget all structures, as benchmarks of structures that nobody sends twice ask for."""
        with self._planning:
            self._planner.forget()
            self._forms.clear()

    def _merge_equal_types(self) -> None:
        """Map names of equal types to one number, so that their nodes are batched together."""
        seen: dict[str, list[int]] = {}
        for number, cell in enumerate(self.cells):
            spec = cell.spec
            likeness = (cell.weights_digest, [p.signature for p in spec.inputs], spec.results, spec.stop)
            twins = seen.setdefault(repr(likeness), [])
            for twin in twins:  # the graphs are compared only where weights and shapes are equal already
                if self.cells[twin].identity == cell.identity:
                    self.layout.numbers[spec.name] = twin
                    break
            else:
                twins.append(number)


Ints = NDArray[np.int64]


def sequence(request: Payload, name: str) -> NDArray[np.generic]:
    """Return the tensor ``name``, at least one step long.

    Raises:
        InvalidInputError: it is missing, empty, or a single number.
    """
    if name not in request:
        raise InvalidInputError(f"the request has no tensor {name!r}: it has {', '.join(request) or 'none'}")
    values = np.asarray(request[name])
    if values.ndim == 0 or len(values) == 0:
        raise InvalidInputError(f"{name}: at least one step is needed, got shape {list(values.shape)}")
    return values


def number(request: Payload, name: str, default: int, *, low: int, high: int) -> int:
    """Return the whole number ``name``, or ``default``.

    Raises:
        InvalidInputError: it is no whole number from ``low`` to ``high``.
    """
    if name not in request:
        return default
    values = np.asarray(request[name])
    if values.size != 1 or values.dtype.kind not in "iu" or not low <= int(values.reshape(-1)[0]) <= high:
        raise InvalidInputError(f"{name}: one whole number from {low} to {high} is needed, got {values.tolist()!r}")
    return int(values.reshape(-1)[0])
