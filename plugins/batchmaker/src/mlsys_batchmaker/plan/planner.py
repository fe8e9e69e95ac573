"""Plans of structures, each made once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from mlsys_core.errors import KernelUnavailableError
from mlsys_core.native import warn_without_kernels

from mlsys_batchmaker.plan.compiled import CompiledPlans
from mlsys_batchmaker.plan.graph import CellGraph
from mlsys_batchmaker.plan.layout import Layout
from mlsys_batchmaker.plan.plan import GraphPlan
from mlsys_batchmaker.plan.reference import make_plan


class Planner:
    """Planner of one model's structures: compiled, or in Python where there is no compiler.

    Args:
        layout: layout of the model's cells.
        max_plans: kept; the least recently used is forgotten first.
    """

    def __init__(self, layout: Layout, *, max_plans: int = 4096) -> None:
        self._make: Callable[[bytes], GraphPlan]
        try:
            self._make = CompiledPlans(layout).make
        except KernelUnavailableError as error:
            warn_without_kernels("BatchMaker's planner", "plans are made in Python", error)
            self._make = partial(make_plan, layout)
        self._max_plans = max_plans
        self._plans: OrderedDict[bytes, GraphPlan] = OrderedDict()

    def plan(self, graph: CellGraph) -> GraphPlan:
        """Return the plan of ``graph``. Not for several threads at once.

        Raises:
            InvalidInputError: the graph has a cycle, is not connected, or wires what does not fit together.
        """
        key = graph.structure()
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make(key)
            if len(self._plans) > self._max_plans:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(key)
        return plan

    def forget(self) -> None:
        """Forget all plans; every structure is new again."""
        self._plans.clear()
