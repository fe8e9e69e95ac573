"""A model: its cells, and how a request unfolds into a graph of them (BatchMaker, section 4.1)."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from mlsys_core.errors import InvalidInputError
from numpy.typing import NDArray

from mlsys_batchmaker.cell import Cell
from mlsys_batchmaker.plan import CellGraph, Layout, Plan, Planner
from mlsys_batchmaker.scheduling.requests import Constants, Grow, Values

Payload: TypeAlias = Mapping[str, NDArray[np.generic]]  # a request's tensors by name


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that a request brings or gets."""

    name: str
    dtype: str  # as in numpy
    shape: tuple[int, ...]  # -1: any size
    is_optional: bool = False  # of a request: it may be left out


class Architecture(Protocol):
    """What a model does with requests; its cells do the rest."""

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
        """The answer from the results of the nodes, in the order they were asked for."""
        ...

    def example(self) -> Payload:
        """A small request, to try the model with."""
        ...

    def config(self) -> Mapping[str, Any]:
        """What makes this architecture again, as JSON."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Unfolded:
    """A request as the scheduler takes it."""

    plan: Plan
    constants: list[list[NDArray[np.generic]]]
    grow: Grow | None = None


class Model:
    """Cells and an architecture.

    Args:
        name: of the model.
        cells: types by name; two of equal identity are one type, whatever they are called.
        architecture: unfolds and finishes.
        max_cells: of a request; larger ones are refused.

    Raises:
        InvalidInputError: cell names are not unique, or the architecture's example does not unfold.
    """

    def __init__(self, name: str, cells: Sequence[Cell], architecture: Architecture, *, max_cells: int = 4096) -> None:
        self.name = name
        self.cells = tuple(cells)
        self.architecture = architecture
        self.max_cells = max_cells
        self.layout = Layout([cell.spec for cell in self.cells])
        self._merge_equal_types()
        self._planner = Planner(self.layout)
        self._grows = architecture if isinstance(architecture, Grows) else None  # asking it of a protocol is slow
        self._planning = threading.Lock()
        try:
            self.unfold(architecture.example())
        except InvalidInputError as error:
            raise InvalidInputError(f"model {name!r}: its own example request does not unfold: {error}") from error

    def unfold(self, request: Payload) -> Unfolded:
        """The request's cell graph, planned. From any thread.

        Raises:
            InvalidInputError: the request is not acceptable: see the message.
        """
        graph = CellGraph(self.layout, max_nodes=self.max_cells)
        self.architecture.unfold(request, graph)
        with self._planning:
            plan = self._planner.plan(graph)
        if self._grows is None:
            return Unfolded(plan, graph.constants)
        return Unfolded(plan, graph.constants, self._grow(request, self._grows, graph.num_nodes))

    def _grow(self, request: Payload, architecture: Grows, num_nodes: int) -> Grow:
        def grow(parts: Sequence[Sequence[Values]]) -> tuple[Plan, Constants] | None:
            nonlocal num_nodes
            graph = CellGraph(self.layout, max_nodes=self.max_cells - num_nodes, must_connect=False)
            if not architecture.extend(request, parts, graph):
                return None
            num_nodes += graph.num_nodes
            with self._planning:
                return self._planner.plan(graph), graph.constants

        return grow

    def forget_plans(self) -> None:
        """Every structure is new again; benchmarks of structures that nobody sends twice ask for it."""
        with self._planning:
            self._planner.forget()

    def _merge_equal_types(self) -> None:
        """Names of equal types lead to one number, so that their nodes are batched together."""
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
