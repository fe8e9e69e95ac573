"""The CPU executor: replays a program natively, without dispatch, allocation or the interpreter's lock.

Everything is settled when it is made: places, packed weights, bound arguments, which worker runs what. Operators
without a kernel run in torch, on views of the same arena, between native *segments*.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
from mlsys_core.memory import Arena
from mlsys_nimble.backends.cpu.decisions import MEASURED, USUAL, Decisions, Measuring, TaskTime, jobs_of, plan_of
from mlsys_nimble.backends.cpu.library import Kernel, View
from mlsys_nimble.backends.cpu.lowering import IN_PLACE, named_kernel, packed_inputs, readers_of
from mlsys_nimble.backends.cpu.own_weights import operators_in_place
from mlsys_nimble.backends.cpu.packing import given_weights, shared_weights
from mlsys_nimble.backends.cpu.replay import Comparison, ReplayPlan, Slots, Team
from mlsys_nimble.backends.reference.operators import compile_operator
from mlsys_nimble.backends.table import Run
from mlsys_nimble.ir.program import Operator, Program, ValueId
from mlsys_nimble.planning.layout import lay_out
from mlsys_nimble.planning.planner import by_rule, candidates
from mlsys_nimble.planning.schedule import Schedule, Segment, segments_of
from mlsys_nimble.planning.storage import ancestors, dependencies, plan_storage
from torch import Tensor

_UNKNOWN_S = 1e-6  # assumed for a kernel without a time in the given decisions


class NativeExecutor:
    """See :class:`mlsys_nimble.backends.executor.Executor`.

    Args:
        program: After the passes.
        num_threads: Workers, the caller's thread among them; None: as many as torch uses.
        use_multi_stream: Whether operators may run side by side; if not, all workers share each.
        winograd: The largest tile that 3x3 convolutions may be computed by: 4, 2 (as exact as the usual way) or 0.
            docs/nimble-cpu.md has what each rounds.
        own: Ids of the constants that are the model's own tensors, which linears may read in place.
        decided: Decisions of an executor of the same program: nothing is measured. Constants that kernels pack may
            then be without memory (torch's ``meta`` device).

    Raises:
        MissingDependencyError: there is no C++ compiler.
        ValueError: the decisions are not those of this program.
    """

    def __init__(
        self,
        program: Program,
        *,
        num_threads: int | None = None,
        use_multi_stream: bool = True,
        winograd: int = 4,
        own: Collection[int] = (),
        decided: Decisions | None = None,
        **_: Any,
    ) -> None:
        self.num_threads = num_threads or torch.get_num_threads()
        self.use_multi_stream = use_multi_stream
        self.source = program  # before the layout
        layout = lay_out(program)
        needed = dependencies(layout)
        self._layout = layout
        self._program = layout.program
        self._storage = plan_storage(layout, ancestors(needed))
        self._arena = Arena(self._storage.plan, "cpu")
        self._arena.buffer.zero_()
        self._addresses = self._roots()
        self._slots = Slots(self._program)
        self._constants = self._row_by_row()
        self._views = {
            value: view for value in range(len(self._program.values)) if (view := self._view(value)) is not None
        }
        changed = {buffer for buffer, _ in self._program.mutations}
        self._fixed = {value: tensor for value, tensor in self._program.constants.items() if value not in changed}
        self._moved_buffers = [
            (self._constants[value], self._program.constants[value])
            for value in changed & self._program.constants.keys()
            if self._constants[value] is not self._program.constants[value]
        ]
        self._kernels: dict[int, Kernel] = {}
        self._seconds: dict[int, float] = {}  # time of each kernel on one thread
        self._torch: dict[int, tuple[Run, Operator]] = {}
        self._team = Team(self.num_threads)
        self._tensors: dict[ValueId, Tensor] = {}
        self._plans: list[ReplayPlan] = []
        in_place = self._in_place(own, decided)
        with shared_weights(), torch.no_grad():
            for index, operator in enumerate(self._program.operators):
                if index in layout.in_place:
                    continue
                kernel = self._bound(operator, decided, IN_PLACE if index in in_place else USUAL)
                if kernel is not None:
                    self._kernels[index] = kernel
                else:
                    self._torch[index] = (compile_operator(operator, self._program.values), operator)
            if decided is not None:
                self._check_memory()
            args = self._program, self._views, self._fixed, self._kernels, self._team, self.num_threads
            self._measuring = Measuring(*args)
            self.schedule, self.decisions = self._schedule(needed, use_multi_stream, winograd, decided)
            self._faults = [(k.fault, index) for index, k in self._kernels.items() if k.fault is not None]
            self._clear_faults()  # measured with zeros, which an empty table has no row for
            self._plans = [
                plan_of(segment, segment.assignment, self._kernels, self._seconds, self.num_threads)
                for segment in self.schedule.segments
            ]

    @property
    def copies(self) -> frozenset[ValueId]:
        """Constants that kernels packed, or that were not row by row; the others are read where they lie."""
        packed = {value for index in self._kernels for value in self._packed(index)}
        moved = {value for value, c in self._program.constants.items() if self._constants[value] is not c}
        return frozenset(packed | moved) & frozenset(self._fixed)

    def release(self, own: Collection[Tensor]) -> None:
        """Forget constants that kernels have packed and nothing reads, but for the caller's ``own``.

        Those that a pass folded exist nowhere else: they would be as large as the model. What is left of them has
        a shape and no memory.
        """
        kept = {id(tensor) for tensor in own}
        for value in self._packed_only():
            tensor = self._program.constants[value]
            if id(tensor) not in kept:
                hollow = torch.empty_like(tensor, device="meta")
                del self._fixed[value]
                self._constants[value] = hollow
                cast(dict[ValueId, Tensor], self._program.constants)[value] = hollow

    def constants(self) -> dict[ValueId, Tensor]:
        """Return the constants row by row; without memory where kernels have packed them and nothing reads."""
        packed = self._packed_only()
        return {
            value: tensor.to("meta") if value in packed else tensor
            for value, tensor in self._constants.items()
            if value in self.source.constants
        }

    def _packed_only(self) -> set[ValueId]:
        """Return the constants that no operator reads where they lie."""
        read = {self._layout.places[value].root for value in self._program.kept()}
        for index, operator in enumerate(self._program.operators):
            if index in self._layout.in_place:
                continue  # another name for its input, whose readers count
            packed = self._packed(index) if index in self._kernels else ()
            read |= {self._layout.places[value].root for value in operator.inputs if value not in packed}
        return set(self._fixed) - read

    def _packed(self, index: int) -> tuple[ValueId, ...]:
        return packed_inputs(self._program.operators[index], self._program.values, self._kernels[index])

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """See :class:`~mlsys_nimble.backends.executor.Executor`.

        Raises:
            IndexError: an index of an embedding is out of range, as in eager.
        """
        program, slots = self._program, self._slots
        for own, buffer in self._moved_buffers:  # somebody may have written to them since
            own.copy_(buffer)
        kept = slots.bind(inputs)
        outputs = slots.results()
        if not self._torch:
            for plan in self._plans:
                self._team.run(plan)
        else:
            self._run_mixed(kept, outputs)
        if self._faults:
            self._raise_faults()
        if program.mutations:
            self._write_back(inputs, kept, outputs)
        if slots.makes_all:
            return list(outputs.values())
        return [
            inputs[program.inputs.index(value)]
            if value in slots.inputs
            else program.constants[value]
            if value in program.constants
            else outputs[value]
            for value in program.outputs
        ]

    def compare(self, pieces: Sequence[tuple[int, int]]) -> Comparison:
        """See :class:`mlsys_nimble.state.digest.Comparing`."""
        return Comparison(pieces, self._team, self.num_threads)

    def poison(self) -> None:
        """Fill the memory of all intermediate results with NaN (integers: -1): no replay may read what another left."""
        self._arena.buffer.fill_(0xFF)

    def trace(self, inputs: Sequence[Tensor]) -> list[TaskTime]:
        """Run one replay and return the times of its native tasks."""
        kept, outputs = self._slots.bind(inputs), self._slots.results()
        found: list[TaskTime] = []
        for segment, plan in zip(self.schedule.segments, self._plans, strict=True):
            found += self._measuring.timed(segment, segment.assignment, plan)
            with torch.no_grad():
                for index in segment.then_torch:
                    self._run_torch(index, kept, outputs)
        self._raise_faults()
        return found

    def _raise_faults(self) -> None:
        found = [index for fault, index in self._faults if fault.value]
        self._clear_faults()
        if found:
            operator = self._program.operators[found[0]]
            where = f" ({operator.source})" if operator.source else ""
            raise IndexError(f"{operator.name}: an index is out of range{where}")

    def _clear_faults(self) -> None:
        for fault, _ in self._faults:
            fault.value = 0

    def _write_back(self, inputs: Sequence[Tensor], kept: Sequence[Tensor], outputs: dict[ValueId, Tensor]) -> None:
        """Every new value to its buffer. All are read before any is written: one may look at another's buffer."""
        with torch.no_grad():
            news = [self._tensor(new, kept, outputs).clone() for _, new in self._program.mutations]
            for (buffer, _), new in zip(self._program.mutations, news, strict=True):
                number = self._slots.inputs.get(buffer)
                (self._program.constants[buffer] if number is None else inputs[number]).copy_(new)
                if number is None and self._constants[buffer] is not self._program.constants[buffer]:
                    self._constants[buffer].copy_(new)

    # Making

    def _roots(self) -> dict[ValueId, int]:
        """Return the addresses of values that own memory in the arena."""
        base = self._arena.buffer.data_ptr()
        return {root: base + offset for root, offset in self._storage.offsets.items()}

    def _row_by_row(self) -> dict[ValueId, Tensor]:
        """Return the constants row by row, as the layout takes them; those that are so already are not copied."""
        constants = self._program.constants
        return {value: c if c.is_contiguous() else c.detach().contiguous() for value, c in constants.items()}

    def _view(self, value: ValueId) -> View | None:
        """Return a value's window as kernels take it, or None if nothing makes the value."""
        place, type_ = self._layout.places[value], self._program.values[value]
        if place.root < 0:
            return None
        if place.root in self._program.constants:
            constant = self._constants[place.root]
            return View(constant.data_ptr() + place.offset * type_.itemsize, type_.dtype, type_.shape, place.strides)
        if place.root in self._slots.addresses:
            slot = self._slots.addresses[place.root]
            return View(None, type_.dtype, type_.shape, place.strides, slot, place.offset * type_.itemsize)
        address = self._addresses[place.root] + place.offset * type_.itemsize
        return View(address, type_.dtype, type_.shape, place.strides)

    def _in_place(self, own: Collection[int], decided: Decisions | None) -> frozenset[int]:
        """Return the operators that read their weight in place."""
        if not own or decided is not None:
            return frozenset()
        return operators_in_place(readers_of(self._program, self._views, self._fixed, self._layout.in_place, own))

    def _bound(self, operator: Operator, decided: Decisions | None, name: str) -> Kernel | None:
        """Bind an operator's kernel: that of the name, or the one that was decided on."""
        if decided is None:
            return named_kernel(name, operator, self._views, self._fixed)
        with given_weights(decided.packed.get(operator.name, ())):
            return named_kernel(decided.kernels.get(operator.name, USUAL), operator, self._views, self._fixed)

    def _check_memory(self) -> None:
        """Raise ValueError where an operator reads a constant that has no memory."""
        without = {value for value, tensor in self._program.constants.items() if tensor.device.type == "meta"}
        if not without <= self._packed_only():
            raise ValueError("a constant without memory is read")

    def _schedule(
        self, needed: Sequence[tuple[int, ...]], use_multi_stream: bool, winograd: int, decided: Decisions | None
    ) -> tuple[Schedule, Decisions]:
        """Choose kernels, then an assignment of each segment: as decided, or the fastest by measurement."""
        segments = segments_of(needed, frozenset(self._torch), frozenset(self._layout.in_place))
        operators = self._program.operators
        if decided is None:
            # Kernels read and write these tensors until the end of this function.
            kept = self._slots.bind(
                [torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in self._slots.input_types]
            )
            scratch = self._slots.results()
            names, self._seconds = self._measuring.choose(segments, winograd)
            names |= {index: IN_PLACE for index, kernel in self._kernels.items() if kernel.is_in_place}
        else:
            kept, scratch, names = [], {}, {}
            self._seconds = {index: decided.seconds.get(operators[index].name, _UNKNOWN_S) for index in self._kernels}
        chosen: list[Segment] = []
        for segment in segments:
            jobs = jobs_of(segment, self._kernels, self._seconds, needed)
            if decided is None:
                found = candidates(jobs, self.num_threads, use_multi_stream=use_multi_stream)[:MEASURED]
                best = self._measuring.fastest(segment, found, self._seconds)
            else:
                best = by_rule(jobs, self.num_threads, decided.rule(len(chosen), self.num_threads))
            chosen.append(Segment(segment.operators, segment.then_torch, best))
        del kept, scratch
        made = decided or Decisions(
            self.num_threads,
            {operators[index].name: name for index, name in names.items()},
            {operators[index].name: took for index, took in self._seconds.items()},
            tuple(segment.assignment.rule for segment in chosen),
            {operators[index].name: kernel.packed for index, kernel in self._kernels.items() if kernel.packed},
        )
        return Schedule(self._layout, self._storage, tuple(chosen), self._seconds), made

    # Running what torch runs

    def _run_mixed(self, inputs: Sequence[Tensor], outputs: dict[ValueId, Tensor]) -> None:
        with torch.no_grad():
            for segment, plan in zip(self.schedule.segments, self._plans, strict=True):
                if segment.operators:
                    self._team.run(plan)
                for index in segment.then_torch:
                    self._run_torch(index, inputs, outputs)

    def _run_torch(self, index: int, inputs: Sequence[Tensor], outputs: dict[ValueId, Tensor]) -> None:
        run, operator = self._torch[index]
        made = run(*(self._tensor(value, inputs, outputs) for value in operator.inputs))
        results = (made,) if isinstance(made, Tensor) else made
        for value, result in zip(operator.outputs, results, strict=True):
            self._tensor(value, inputs, outputs).copy_(result)

    def _tensor(self, value: ValueId, inputs: Sequence[Tensor], outputs: dict[ValueId, Tensor]) -> Tensor:
        """Return a value as torch sees it."""
        found = self._tensors.get(value)
        if found is not None:
            return found
        program, place = self._program, self._layout.places[value]
        type_ = program.values[value]
        if place.root in outputs:
            return outputs[place.root]
        if place.root in self._slots.inputs:
            given = inputs[program.inputs.index(place.root)]
            return given.as_strided(type_.shape, place.strides, given.storage_offset() + place.offset)
        if place.root in program.constants:
            base = self._constants[place.root].detach()
        else:
            first = self._storage.offsets[place.root]
            nbytes = program.values[place.root].nbytes
            base = self._arena.buffer[first : first + nbytes].view(getattr(torch, type_.dtype))
        found = base.as_strided(type_.shape, place.strides, base.storage_offset() + place.offset)
        self._tensors[value] = found
        return found
