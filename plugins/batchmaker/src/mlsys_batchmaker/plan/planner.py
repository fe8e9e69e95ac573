"""Plans of structures, each made once, by ``plan.cpp``."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from ctypes import c_char, c_int64
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from mlsys_core.native import Kernel, bind, expect, new
from numpy.typing import NDArray

from mlsys_batchmaker.plan import plan
from mlsys_batchmaker.plan.checks import check_structure
from mlsys_batchmaker.plan.graph import CellGraph
from mlsys_batchmaker.plan.layout import Layout
from mlsys_batchmaker.plan.plan import COLUMNS, SUB_COLUMNS, GraphPlan, Ints, Kind, Pairs
from mlsys_batchmaker.plan.structure import sizes_of

PLAN = Kernel(Path(__file__).with_name("plan.cpp"))


class Planner:
    """Planner of one model's structures.

    Args:
        layout: layout of the model's cells.
        max_plans: kept; the least recently used is forgotten first.

    Raises:
        KernelUnavailableError: the wheel has no library for this processor, and there is no C++ compiler.
    """

    def __init__(self, layout: Layout, *, max_plans: int = 4096) -> None:
        self._maker = PlanMaker(layout)
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
            plan = self._plans[key] = self._maker.make(key)
            if len(self._plans) > self._max_plans:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(key)
        return plan

    def forget(self) -> None:
        """Forget all plans; every structure is new again."""
        self._plans.clear()


class PlanMaker:
    """Maker of plans of one model's structures, none of them kept.

    Args:
        layout: layout of the model.
    """

    def __init__(self, layout: Layout) -> None:
        self._library = _load()
        self._layout = layout
        self._banks = [np.ascontiguousarray(table) for table in (layout.input_banks, layout.output_banks)]
        self._struct = new(
            self._library.structs["Layout"],
            num_cells=len(layout.cells),
            num_inputs=layout.num_inputs,
            num_outputs=layout.num_outputs,
            num_banks=layout.none,
            input_banks=self._banks[0].ctypes.data,
            output_banks=self._banks[1].ctypes.data,
        )
        self._address = ctypes.addressof(self._struct)
        self._sizes = (c_int64 * (6 + layout.none))()
        self._out = np.empty(4096, dtype=np.int64)  # a plan and what follows it, before it is copied
        self._kinds: dict[bytes, tuple[Kind, ...]] = {}

    def make(self, structure: bytes) -> GraphPlan:
        """Check a structure and plan it. Not for several threads at once.

        Args:
            structure: see :mod:`mlsys_batchmaker.plan.structure`.

        Raises:
            InvalidInputError: there is a cycle, nodes are not connected, or a wire does not fit.
        """
        layout, (count, num_results, _) = self._layout, sizes_of(structure)
        columns = COLUMNS + layout.num_inputs + layout.num_outputs
        most = count * (2 * columns + 2 + 2 * SUB_COLUMNS + 4 + 5 * layout.num_inputs) + 4 * num_results
        if most > len(self._out):
            self._out = np.empty(2 * most, dtype=np.int64)
        out, sizes = self._out, self._sizes
        if not self._library.batchmaker_plan(self._address, structure, address_of(out), sizes):
            check_structure(layout, structure)  # raises, and says why
            raise AssertionError("plan.cpp refuses a structure without a fault")
        size, subs, num_kinds, num_more, num_sub_more, result_cell, *num_rows = sizes
        kinds = self._kinds_of(out[size : size + num_kinds])
        more = size + num_kinds
        sub_more = more + num_more
        return GraphPlan(
            out[:size].copy(),
            count,
            columns,
            subs,
            num_results,
            tuple(num_rows),
            kinds,
            _pairs(out[more:sub_more]) if num_more else (),
            _pairs(out[sub_more : sub_more + num_sub_more]) if num_sub_more else (),
            None if result_cell < 0 else result_cell,
        )

    def _kinds_of(self, numbers: Ints) -> tuple[Kind, ...]:
        key = numbers.tobytes()
        kinds = self._kinds.get(key)
        if kinds is None:
            found = []
            for cell, joins, is_awaited, form, *carry in numbers.reshape(-1, 4 + self._layout.num_inputs).tolist():
                carries = ((), tuple(carry), None)[form]
                found.append(Kind(cell, carries, bool(joins), bool(is_awaited)))
            kinds = self._kinds[key] = tuple(found)
        return kinds


def _pairs(numbers: Ints) -> Pairs:
    return tuple((first, second) for first, second in numbers.reshape(-1, 2).tolist())


def address_of(array: NDArray[np.generic]) -> int:
    """Return the address of the array's first number.

    Equal to ``array.ctypes.data``, in a third of the time where the array is writable and contiguous.
    """
    try:
        return ctypes.addressof(c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # read only, in strides, or empty
        address: int = array.__array_interface__["data"][0]
        return address


@cache
def _load() -> Any:
    kernel = PLAN.load()
    # Calls of microseconds keep the interpreter's lock.
    library = bind(ctypes.PyDLL(kernel._name, handle=kernel._handle), by_address=True)
    expect(library, **{name: getattr(plan, name) for name in library.constants})
    return library
