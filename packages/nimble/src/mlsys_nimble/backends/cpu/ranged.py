"""One preparation for many sizes: the native executor's schedule, made anew for each size in under 2 ms.

Weights are packed, kernels chosen and workers' lists decided once, at the hint. A new size evaluates the numbers in
kernels' arguments that depend on sizes, writes them where they lie, and makes kernels and plans of them natively
(``resize.h``). Sizes share one arena, in which each has offsets of its own.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from mlsys_core.memory import Arena
from mlsys_core.native import new
from mlsys_nimble.backends.cpu.executor import NativeExecutor
from mlsys_nimble.backends.cpu.library import Kernel
from mlsys_nimble.backends.cpu.replay import PIECE_S, load_executor
from mlsys_nimble.backends.reference.operators import ReferenceExecutor, compile_operator
from mlsys_nimble.ir.program import Operator, Program, ValueId
from mlsys_nimble.ir.sizes import Atom, AtSizes, Sheet, Size, at_sizes, evaluate, has_sizes, poly_of, symbol
from mlsys_nimble.planning.schedule import Segment
from mlsys_nimble.planning.storage import ALIGNMENT, Storage, stack_of
from torch import Tensor

KEPT = 1024  # cached sizes, each with kernels and plans; least recently used goes first


@dataclass(frozen=True, slots=True)
class SizePlace:
    """Where a call shows one of the sizes that vary."""

    symbol: str
    number: int  # index of the input
    dim: int


class RangedExecutor(NativeExecutor):
    """See :class:`mlsys_nimble.backends.executor.Executor`; inputs may have any sizes that the program serves.

    Args:
        program: After the passes, its types at the hint; the last inputs are the tables'.
        places: One place for each symbol.
        tables: Program of what depends on sizes alone.
        largest: Largest size of each symbol, in the order of ``places``: memory is reserved for it, and used as needed.
        options: See :class:`NativeExecutor`.
    """

    def __init__(
        self, program: Program, *, places: Sequence[SizePlace], tables: Program, largest: Sequence[int], **options: Any
    ) -> None:
        super().__init__(program, **options)
        self._places, self._tables = tuple(places), tables
        values, roots = self._program.values, list(self._storage.offsets)
        nbytes = [values[root].nbytes for root in roots]
        self._stack = stack_of([*self._storage.offsets.values()], nbytes, self._storage.conflicts, ALIGNMENT)
        self._atoms = [Atom(_address_of(root)) for root in roots]
        self._nbytes = Sheet([poly_of(size) for size in nbytes])
        self._arguments = _Arguments(self._kernels)
        self._assigned = [
            _Assigned(self._arguments, s, self._seconds, self.num_threads) for s in self.schedule.segments
        ]
        self._resized: OrderedDict[tuple[int, ...], NativeExecutor] = OrderedDict()
        self._plans = []
        self._arena = Arena(self._stack.offsets(self._nbytes.values(self._known(largest)).tolist())[1])

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """See :class:`NativeExecutor`; a size that is new here is made ready first."""
        sizes = tuple([inputs[place.number].shape[place.dim] for place in self._places])
        executor = self.at(sizes)
        return NativeExecutor.run(executor, [*inputs, *executor.given])

    def at(self, sizes: tuple[int, ...]) -> Any:
        """Return the executor of these sizes, in the order of the places."""
        found = self._resized.get(sizes)
        if found is None:
            found = self._resized[sizes] = self._made(sizes)
            if len(self._resized) > KEPT:
                self._resized.popitem(last=False)
        self._resized.move_to_end(sizes)
        return found

    def poison(self) -> None:
        """Fill the memory of all intermediate results with NaN; see :class:`NativeExecutor`."""
        self._arena.buffer.fill_(0xFF)

    def _roots(self) -> dict[ValueId, int]:
        return {root: symbol(_address_of(root), address) for root, address in super()._roots().items()}

    def _known(self, sizes: Sequence[int]) -> dict[Atom, int]:
        return {Atom(place.symbol): size for place, size in zip(self._places, sizes, strict=True)}

    def _made(self, sizes: tuple[int, ...]) -> NativeExecutor:
        known = self._known(sizes)
        offsets, peak = self._stack.offsets(self._nbytes.values(known).tolist())
        if peak > self._arena.buffer.numel():
            self._resized.clear()  # their memory goes
            self._arena = Arena(max(peak, self._arena.buffer.numel() * 3 // 2))
        base = self._arena.buffer.data_ptr()
        known.update(zip(self._atoms, [base + offset for offset in offsets], strict=True))

        def value(size: Size) -> int:
            return evaluate(size.poly, known)

        made: Any = copy(self)
        made._resized = OrderedDict()
        made._storage = Storage(self._storage.plan, dict(zip(self._storage.offsets, offsets, strict=True)))
        made._program = replace(self._program, values=AtSizes(self._program.values, value))
        made._layout = replace(self._layout, places=AtSizes(self._layout.places, value))
        made._slots = self._slots.resized(made._program.values)
        made._tensors = {}
        made._torch = {i: self._torch_at(operator, run, made, value) for i, (run, operator) in self._torch.items()}
        made.given = _run_tables(self._tables, value)
        kernels = self._arguments.made(known)
        made._plans = [_ResizedPlan(assigned, kernels) for assigned in self._assigned]
        return made  # type: ignore[no-any-return]

    def _torch_at(self, operator: Operator, run: Any, made: Any, value: Any) -> tuple[Any, Operator]:
        types = [self._program.values[v] for v in (*operator.inputs, *operator.outputs)]
        if not has_sizes(types) and not has_sizes(operator.kind):
            return run, operator
        operator = replace(operator, kind=at_sizes(operator.kind, value))
        return compile_operator(operator, made._program.values), operator


def _address_of(root: ValueId) -> str:
    return f"address of %{root}"


def _run_tables(tables: Program, value: Any) -> list[Tensor]:
    """Compute what depends on sizes alone."""
    if not tables.outputs:
        return []
    operators = tuple(replace(each, kind=at_sizes(each.kind, value)) for each in tables.operators)
    program = replace(tables, values=AtSizes(tables.values, value), operators=operators)
    return [made.contiguous() for made in ReferenceExecutor(program).run([])]


class _Arguments:
    """Arguments of all kernels, ready to be written."""

    def __init__(self, kernels: dict[int, Kernel]) -> None:
        self._native = load_executor()
        self._kept = dict(kernels)  # their weights, and the arguments' memory
        blueprints = [(index, kernel.blueprint) for index, kernel in kernels.items() if kernel.blueprint is not None]
        self.number = {index: number for number, (index, _) in enumerate(blueprints)}
        varying = [each for _, blueprint in blueprints for each in blueprint.varying()]
        polys = {poly: number for number, poly in enumerate(dict.fromkeys(each.size.poly for each in varying))}
        self._sheet = Sheet([*polys])
        write, recipe = self._native.structs["Write"], self._native.structs["Recipe"]
        self._writes = (write * len(varying))(
            *(new(write, place=v.address, width=v.nbytes, index=polys[v.size.poly]) for v in varying)
        )
        self._recipes = (recipe * len(blueprints))(
            *(new(recipe, maker=b.maker, arguments=ctypes.addressof(b.arguments)) for _, b in blueprints)
        )

    def made(self, known: dict[Atom, int]) -> _Made:
        """Write the arguments at these sizes, and make the kernels."""
        values = np.ascontiguousarray(self._sheet.values(known))
        self._native.nimble_write(self._writes, len(self._writes), values.ctypes.data_as(ctypes.c_void_p))
        return _Made(self._native, self._recipes, self)


class _Made:
    """Kernels of one size, freed with this object."""

    def __init__(self, native: Any, recipes: Any, owner: _Arguments) -> None:
        self.addresses = (ctypes.c_void_p * max(len(recipes), 1))()
        native.nimble_make(recipes, len(recipes), self.addresses)
        self._owner = owner
        weakref.finalize(self, native.nimble_unmake, self.addresses, len(recipes))


class _Assigned:
    """A segment's assignment as the native code takes it."""

    def __init__(self, arguments: _Arguments, segment: Segment, seconds: dict[int, float], num_workers: int) -> None:
        native = load_executor()
        share, wait = native.structs["Share"], native.structs["Wait"]
        shares: list[Any] = []
        waits: list[Any] = []
        for worker, pieces in enumerate(segment.assignment.lists):
            for piece in pieces:
                index = segment.operators[piece.job]
                units = arguments._kept[index].units
                took = seconds.get(index, 0.0)
                grain = max(1, math.ceil(units * PIECE_S / took)) if took else units
                shares.append(
                    new(
                        share,
                        worker=worker,
                        kernel=arguments.number[index],
                        part=piece.part,
                        num_parts=piece.num_parts,
                        first_wait=len(waits),
                        num_waits=len(piece.waits),
                        grain=grain,
                    )
                )
                waits += [new(wait, worker=other, count=count) for other, count in piece.waits]
        self.num_workers = num_workers
        self.shares = (share * max(len(shares), 1))(*shares)
        self.waits = (wait * max(len(waits), 1))(*waits)
        self.num_tasks = len(shares)


class _ResizedPlan:
    """Plan of one segment at one size; stands in for :class:`~mlsys_nimble.backends.cpu.replay.ReplayPlan`."""

    def __init__(self, assigned: _Assigned, kernels: _Made) -> None:
        native = load_executor()
        self.num_tasks = assigned.num_tasks
        self._kernels = kernels
        self.handle: int = native.nimble_plan_of(
            assigned.num_workers, assigned.shares, assigned.num_tasks, kernels.addresses, assigned.waits
        )
        weakref.finalize(self, native.nimble_plan_free, self.handle)
