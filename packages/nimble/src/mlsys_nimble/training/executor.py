"""Executor of training graphs on the CPU: own kernels on planned memory, torch's operators between them.

Unlike the native executor of inference it copies neither inputs nor results: kernels read weights and saved activations
in place, through pointers that each call sets. Temporaries lie in one planned arena, values that outlive the call in
recycled buffers (recycle.py), and results of torch's operators in torch's memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from ctypes import addressof, c_void_p
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from mlsys_core.memory import Lifetime, plan_offsets
from torch import Tensor

from mlsys_nimble.backends.cpu.library import Kernel, View
from mlsys_nimble.backends.recycle import Recycled
from mlsys_nimble.backends.table import Run
from mlsys_nimble.ir.operators import VIEWS, Copy
from mlsys_nimble.ir.program import Operator, Program, ValueId
from mlsys_nimble.ir.strides import Strides
from mlsys_nimble.training.binding import image_inputs, make_kernels, strides_by_kernel, torch_run
from mlsys_nimble.training.convolutions import Into
from mlsys_nimble.training.kernels import KernelList, load
from mlsys_nimble.training.rows import join_rows


@dataclass(frozen=True, slots=True)
class Prerun:
    """Layout found by a pre-run."""

    program: Program  # with copies of inputs that kernels take in other strides
    runs: tuple[Run | None, ...]  # by operator: torch's function; None: kernels run it
    placed: frozenset[ValueId]  # values in planned memory, made by kernels or by an Into
    strides: dict[ValueId, Strides]
    root: dict[ValueId, ValueId]  # the value that owns the memory; the value itself, if it owns any


def prerun(program: Program, inputs: Sequence[Tensor]) -> Prerun:
    """Run the program once on inputs with the strides of later calls; inputs are not written to."""
    values = list(program.values)
    tensors: dict[ValueId, Tensor] = dict(zip(program.inputs, inputs, strict=True))
    tensors.update(program.constants)
    root = {value: value for value in tensors}
    operators: list[Operator] = []
    runs: list[Run | None] = []
    placed: set[ValueId] = set()

    def visit(operator: Operator, run: Run, strides: list[Strides] | None) -> None:
        arguments = [tensors[value] for value in operator.inputs]
        made = run(*arguments)
        results = [made] if isinstance(made, Tensor) else list(made)
        for number, (value, result) in enumerate(zip(operator.outputs, results, strict=True)):
            root[value] = value
            if strides is not None:
                result = torch.empty_strided(result.shape, strides[number], dtype=result.dtype).copy_(result)
            else:
                for name, argument in zip(operator.inputs, arguments, strict=True):
                    if result.untyped_storage()._cdata == argument.untyped_storage()._cdata:
                        root[value] = root[name]
            tensors[value] = result
        operators.append(operator)
        runs.append(run if strides is None or isinstance(run, Into) else None)
        placed.update(operator.outputs if strides is not None else ())

    for operator in program.operators:
        lies_badly = image_inputs(operator, values, [tensors[value] for value in operator.inputs])
        for index in lies_badly:
            value = operator.inputs[index]
            copied = len(values)
            values.append(values[value])
            visit(Operator(f"{operator.name}_input{index}", Copy(), (value,), (copied,)), _channels_last, None)
            operator = replace(operator, inputs=(*operator.inputs[:index], copied, *operator.inputs[index + 1 :]))
        run = torch_run(operator, values)
        if isinstance(run, Into):
            visit(operator, run, [run.strides])
        else:
            visit(operator, run, strides_by_kernel(operator, values, [tensors[value] for value in operator.inputs]))
    found = replace(program, values=tuple(values), operators=tuple(operators))
    return Prerun(
        found, tuple(runs), frozenset(placed), {value: tensor.stride() for value, tensor in tensors.items()}, root
    )


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


MAX_REPLAYS = 4  # sets of input strides that are kept


class TensorExecutor:
    """Executor of training graphs; see :class:`mlsys_nimble.backends.executor.Executor`.

    Args:
        program: Program after the passes of training.
        num_threads: Number of threads of the kernels; None: as many as torch uses.

    Raises:
        MissingDependencyError: there is no C++ compiler.
    """

    copies: frozenset[ValueId] = frozenset()

    def __init__(self, program: Program, *, num_threads: int | None = None, **_: Any) -> None:
        self._program = join_rows(program, load().kernel_lanes())
        self._num_threads = num_threads or torch.get_num_threads()
        self._replays: OrderedDict[Any, _Replay] = OrderedDict()

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run as an :class:`~mlsys_nimble.backends.executor.Executor`; each set of input strides is bound once."""
        with torch.inference_mode(False), torch.no_grad():  # memory made here also serves calls outside inference mode
            key = tuple([tensor.stride() for tensor in inputs])
            replay = self._replays.get(key)
            if replay is None:
                with torch.random.fork_rng([]):  # the pre-run must not advance the generators
                    found = prerun(self._program, inputs)
                replay = self._replays[key] = _Replay(found, self._num_threads)
                if len(self._replays) > MAX_REPLAYS:
                    self._replays.popitem(last=False)
            return replay.run(inputs)

    @property
    def nbytes(self) -> int:
        """Return the bytes held between calls: arenas and recycled buffers."""
        return sum(replay.nbytes for replay in self._replays.values())


@dataclass(slots=True)
class _Step:
    """Consecutive kernels, or one operator of torch."""

    run: Any
    inputs: tuple[ValueId, ...] = ()
    outputs: tuple[ValueId, ...] = ()
    pointers: tuple[tuple[int, ValueId], ...] = ()  # (slot, output) of outputs that kernels read through pointers
    done: tuple[ValueId, ...] = ()  # values that no later step reads
    is_kernels: bool = False
    is_into: bool = False  # `run` takes the memory of its result first
    kernels: list[Kernel] = field(default_factory=list)


class _Replay:
    """Program bound to memory, for one set of input strides."""

    def __init__(self, found: Prerun, num_threads: int) -> None:
        self._found = found
        self._program = program = found.program
        self._values: list[Tensor | None] = [None] * len(program.values)
        kept = {found.root[value] for value in program.kept()}
        self._pools = [
            (value, Recycled(program.values[value].shape, found.strides[value], _dtype(program, value)))
            for value in sorted(found.placed & kept)
        ]
        self._place_temporaries(found.placed - kept)
        self._slots: dict[ValueId, int] = {}
        self._pointers = (c_void_p * max(len(program.values), 1))()
        self._steps = self._make_steps(num_threads)
        self._input_slots = [
            (number, self._slots[value]) for number, value in enumerate(program.inputs) if value in self._slots
        ]
        self._pool_slots = [(value, pool, self._slots.get(value)) for value, pool in self._pools]

    @property
    def nbytes(self) -> int:
        """Return the bytes held between calls."""
        return self._arena.nbytes + sum(pool.nbytes for _, pool in self._pools)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs; the caller's memory is read in place."""
        program, pointers = self._program, self._pointers
        values = self._values.copy()
        for value, tensor in zip(program.inputs, inputs, strict=True):
            values[value] = tensor
        for number, at in self._input_slots:
            pointers[at] = inputs[number].data_ptr()
        for value, pool, slot in self._pool_slots:
            values[value] = tensor = pool.take()
            if slot is not None:
                pointers[slot] = tensor.data_ptr()
        for step in self._steps:
            if step.is_kernels:
                step.run()
            elif step.is_into:
                step.run(values[step.outputs[0]], *[values[value] for value in step.inputs])
            else:
                made = step.run(*[values[value] for value in step.inputs])
                if len(step.outputs) == 1:
                    values[step.outputs[0]] = made if isinstance(made, Tensor) else made[0]
                else:
                    for value, result in zip(step.outputs, made, strict=True):
                        values[value] = result
                for slot, value in step.pointers:
                    pointers[slot] = values[value].data_ptr()  # type: ignore[union-attr]
            for value in step.done:
                values[value] = None
        outputs = [values[value] for value in program.outputs]
        if program.mutations:
            news = [values[new].clone() for _, new in program.mutations]  # type: ignore[union-attr]
            for (old, _), new in zip(program.mutations, news, strict=True):
                values[old].copy_(new)  # type: ignore[union-attr]
        return outputs  # type: ignore[return-value]

    # Making

    def _pairs(self) -> list[tuple[Operator, Run | None]]:
        return list(zip(self._program.operators, self._found.runs, strict=True))

    def _place_temporaries(self, temporaries: frozenset[ValueId]) -> None:
        """Allocate one arena for temporaries that kernels make; create views of it once."""
        program, found = self._program, self._found
        first: dict[ValueId, int] = {}
        last: dict[ValueId, int] = {}
        for index, operator in enumerate(program.operators):
            for value in (*operator.inputs, *operator.outputs):
                root = found.root[value]
                if root in temporaries:
                    first.setdefault(root, index)
                    last[root] = index
        roots = sorted(first)
        plan = plan_offsets([Lifetime(program.values[r].nbytes, first[r], last[r] + 1) for r in roots], alignment=64)
        self._arena = torch.empty(plan.peak_nbytes + 4096, dtype=torch.uint8)
        base = -self._arena.data_ptr() % 4096
        for root, offset in zip(roots, plan.offsets, strict=True):
            type_ = program.values[root]
            flat = self._arena[base + offset : base + offset + type_.nbytes].view(_dtype(program, root))
            self._values[root] = flat.as_strided(type_.shape, found.strides[root], flat.storage_offset())
        self._values_of_constants()
        self._is_view = [False] * len(program.operators)
        for index, (operator, run) in enumerate(self._pairs()):
            sources = [self._values[value] for value in operator.inputs]
            if run is None or not isinstance(operator.kind, VIEWS) or any(source is None for source in sources):
                continue
            if found.root[operator.outputs[0]] in temporaries:
                self._values[operator.outputs[0]] = run(*sources)
                self._is_view[index] = True

    def _values_of_constants(self) -> None:
        for value, tensor in self._program.constants.items():
            self._values[value] = tensor

    def _make_steps(self, num_threads: int) -> list[_Step]:
        program = self._program
        steps: list[_Step] = []
        made_at: dict[ValueId, _Step] = {}
        reads: dict[ValueId, int] = {}  # the last step that reads a value, kernels through pointers too
        for index, (operator, run) in enumerate(self._pairs()):
            if self._is_view[index]:
                continue
            if run is None:
                if not steps or not steps[-1].is_kernels:
                    steps.append(_Step(None, is_kernels=True))
                views = [[self._view(value) for value in group] for group in (operator.inputs, operator.outputs)]
                steps[-1].kernels += make_kernels(operator, views[0], views[1])
            elif isinstance(run, Into):
                steps.append(_Step(run.write, operator.inputs, operator.outputs, is_into=True))
            else:
                steps.append(_Step(run, operator.inputs, operator.outputs))
                made_at.update(dict.fromkeys(operator.outputs, steps[-1]))
            for value in (*operator.inputs, *operator.outputs):
                reads[value] = len(steps) - 1
        for value, slot in self._slots.items():
            if value in made_at:
                made_at[value].pointers += ((slot, value),)
        kept = program.kept() | {old for old, _ in program.mutations}
        for value, at in reads.items():
            if value not in kept and self._values[value] is None:
                steps[at].done += (value,)
        for step in steps:
            if step.is_kernels:
                step.run = KernelList(step.kernels, num_threads).run
        return steps

    def _view(self, value: ValueId) -> View:
        """Return a view of a value: at a fixed address, or through a pointer that each call sets."""
        known = self._values[value]
        if known is not None:
            return View.of(known)
        slot = self._slots.setdefault(value, len(self._slots))
        type_, strides = self._program.values[value], self._found.strides[value]
        return View(None, type_.dtype, type_.shape, strides, addressof(self._pointers) + 8 * slot)


def _dtype(program: Program, value: ValueId) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, program.values[value].dtype)
    return dtype
