"""A request on its way through the cellular scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from mlsys_core.loop import FinishReason
from numpy.typing import NDArray

from mlsys_batchmaker.plan.plan import GraphPlan

Constants: TypeAlias = Sequence[Sequence[NDArray[np.generic]]]  # by bank, in the order of their rows
Values: TypeAlias = tuple[NDArray[np.generic] | np.generic, ...]  # a node's results, by ``CellSpec.results``


# (values of all parts so far) -> the next part's plan and constants; None: the request is done.
Grow: TypeAlias = Callable[[Sequence[Sequence["Values"]]], tuple[GraphPlan, Constants] | None]


@dataclass(frozen=True, slots=True, eq=False)
class Earlier:
    """Parts of a growing request that were computed before this one."""

    values: tuple[list[Values], ...]
    num_cells: int
    added_s: float
    started_s: float | None


@dataclass(frozen=True, slots=True, eq=False)
class CellRequest:
    """An unfolded request."""

    request_id: str
    plan: GraphPlan
    constants: Constants  # constants of its cell graph
    deadline_s: float | None = None  # seconds of the loop's clock
    on_values: Callable[[Values], None] | None = None  # called with a node's results as they come, in the loop's thread
    grow: Grow | None = None  # asked when all cells are computed, in the loop's thread; None: it does not grow
    earlier: Earlier | None = None


@dataclass(frozen=True, slots=True)
class CellResult:
    """Result of a finished request. Times are seconds of the loop's clock."""

    values: list[Values]  # results of the nodes it asked for, in that order, part by part; a chain that stopped has
    # none after its stop
    num_cells: int  # computed for it, without what was computed in vain after a stop
    added_s: float
    started_s: float  # its first task began to run
    ended_s: float


class ValueStore(Protocol):
    """Destination of an admitted request's constants: the state pools of all devices."""

    def load(self, starts: Sequence[int], constants: Constants) -> None:
        """Write ``constants[bank]`` to the rows from ``starts[bank]`` on."""
        ...


class NoValues:
    """A store that keeps nothing, for simulations."""

    def load(self, starts: Sequence[int], constants: Constants) -> None:
        """See :class:`ValueStore`."""


@dataclass(slots=True, eq=False)
class Live:
    """An admitted request and the blocks it holds."""

    request: CellRequest
    index: int  # in the tables
    node_start: int
    sub_start: int
    starts: tuple[int, ...]  # first number of each of its blocks, as `GraphPlan.blocks`
    added_s: float
    started_s: float | None = None
    num_cells: int = 0
    first_slot: int = 0
    reason: FinishReason | None = None  # it has left; its blocks are free once nothing of it is in flight
    is_cut: bool = False  # a chain of it has stopped, so some results do not exist

    def result(self, values: list[Values], now: float) -> CellResult:
        """Return the result of the request."""
        return CellResult(values, self.num_cells, self.added_s, now if self.started_s is None else self.started_s, now)
