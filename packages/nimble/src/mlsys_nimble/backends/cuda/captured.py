"""One captured schedule: the pre-run on the assigned streams, the capture, and the memory of a replay.

Memory is released by happens-before, not by program order: torch's allocator gives a freed block to the next
allocation on the stream that it was allocated on, while another stream may still read it. So a value is released just
before the first operator on its own stream that all its readers surely precede; the next owner of the block runs later
still.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from mlsys_nimble.backends.cuda.convolutions import SelectedConvolution
from mlsys_nimble.backends.cuda.driver import Driver, Handle
from mlsys_nimble.backends.cuda.plan import ORIGIN, Record, Run, StreamPlan, Wait, happens_before
from mlsys_nimble.backends.recycle import count_of, is_held
from mlsys_nimble.backends.table import Run as Function
from mlsys_nimble.ir.program import Program, ValueId
from mlsys_nimble.planning.streams import Bits
from torch import Tensor

ALIGNMENT = 512  # bytes; torch rounds its blocks up to it


@dataclass(frozen=True, slots=True)
class Released:
    """Values to release; all that share a block are released at once."""

    before: tuple[tuple[ValueId, ...], ...]  # [operator]: values released before it runs
    never: tuple[ValueId, ...]  # roots that are held as long as the schedule


def plan_releases(
    program: Program, plan: StreamPlan, root: Mapping[ValueId, ValueId], held: AbstractSet[ValueId]
) -> Released:
    """Plan when each value that operators make is released.

    Args:
        program: Program after the passes.
        plan: Commands for its operators.
        root: Owner of each value's memory, found by a pre-run.
        held: Roots that outlive a replay: results, constants, the caller's tensors.
    """
    before = happens_before(plan, len(program.operators))
    stream_of = {command.operator: command.stream for command in plan.commands if isinstance(command, Run)}
    uses: dict[ValueId, Bits] = {}
    members: dict[ValueId, list[ValueId]] = {}
    made_on: dict[ValueId, int] = {}
    for index, operator in enumerate(program.operators):
        for value in operator.outputs:
            members.setdefault(root[value], []).append(value)
            made_on.setdefault(root[value], stream_of[index])
        for value in (*operator.inputs, *operator.outputs):
            uses[root[value]] = uses.get(root[value], 0) | 1 << index
    waiting: dict[int, list[ValueId]] = {}  # [stream]: roots not released yet
    for made, stream in made_on.items():
        if made not in held:
            waiting.setdefault(stream, []).append(made)
    released: list[tuple[ValueId, ...]] = [()] * len(program.operators)
    for command in plan.commands:
        if isinstance(command, Run):
            mine = waiting.get(command.stream, [])
            free = [made for made in mine if not uses[made] & ~before[command.operator]]
            released[command.operator] = tuple(value for made in free for value in members[made])
            waiting[command.stream] = [made for made in mine if made not in free]
    return Released(tuple(released), tuple(made for rest in waiting.values() for made in rest))


def peak_nbytes(program: Program, plan: StreamPlan, released: Released, root: Mapping[ValueId, ValueId]) -> int:
    """Return the least bytes that a capture must reserve: the sum over streams of the most held at one time.

    A block stays with its stream, so each stream has its own peak. Allocations inside operators are not counted.
    """
    held: dict[int, int] = {}
    peaks: dict[int, int] = {}
    stream_of: dict[ValueId, int] = {}
    for command in plan.commands:
        if not isinstance(command, Run):
            continue
        for value in released.before[command.operator]:
            if root[value] == value:
                held[stream_of[value]] -= _rounded(program.values[value].nbytes)
        for value in program.operators[command.operator].outputs:
            if root[value] == value:
                stream_of[value] = command.stream
                held[command.stream] = held.get(command.stream, 0) + _rounded(program.values[value].nbytes)
        peaks[command.stream] = max(peaks.get(command.stream, 0), held.get(command.stream, 0))
    return sum(peaks.values())


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


Location = tuple[int, tuple[int, ...]]  # an address and strides


def location_of(tensor: Tensor) -> Location:
    """Return a tensor's address and strides."""
    return tensor.data_ptr(), tensor.stride()


@dataclass(slots=True, eq=False, weakref_slot=True)
class CapturedSchedule:
    """CUDA graph, and the memory that it is bound to."""

    graph: Handle
    locations: list[Location]  # addresses and strides at which it reads each input
    copies: dict[int, Tensor]  # own memory for inputs that calls copy, by input number
    results: dict[ValueId, Tensor]  # a replay's results, and new values of tensors that the call changes
    held: list[Tensor]  # memory that no operator may reuse
    counts: list[tuple[int, int]] = field(default_factory=list)  # storages that callers get: handle, count when free

    @property
    def is_free(self) -> bool:
        """Return whether only this schedule holds the results of its replays."""
        return not any(is_held(handle, free) for handle, free in self.counts)

    def owns(self, tensor: Tensor) -> bool:
        """Return whether the tensor lies in memory that a replay writes results to."""
        handle = tensor.untyped_storage()._cdata
        return any(handle == own for own, _ in self.counts)

    def fits(self, locations: Sequence[Location]) -> bool:
        """Return whether inputs at these locations can be read in place or are copied."""
        return all(
            number in self.copies or own == location
            for number, (own, location) in enumerate(zip(self.locations, locations, strict=True))
        )


_LIVE: WeakSet[CapturedSchedule] = WeakSet()


def is_result(tensor: Tensor) -> bool:
    """Return whether some schedule writes the tensor's memory, such as what a forward pass saves for the backward."""
    return any(captured.owns(tensor) for captured in _LIVE)


class Recorder:
    """Recorder that runs a plan on a driver: once to warm up and observe memory, then to capture.

    Args:
        program: Program after the passes.
        plan: Commands for its operators.
        functions: Functions that run its operators.
        driver: Driver of the device.
        returns_in_place: True gives callers the memory that replays write, so a capture whose results are held is busy.
    """

    def __init__(
        self,
        program: Program,
        plan: StreamPlan,
        functions: Sequence[Function],
        driver: Driver,
        *,
        returns_in_place: bool,
    ) -> None:
        self._program, self._plan, self._functions, self._driver = program, plan, functions, driver
        self._returns_in_place = returns_in_place
        self._streams = [driver.new_stream() for _ in range(plan.num_streams)]
        self._released: Released | None = None
        own = {value for operator in program.operators for value in operator.outputs}
        self._kept = sorted(program.kept() & own)

    def record(self, inputs: Sequence[Tensor], copied: Sequence[int], pool: Handle) -> CapturedSchedule:
        """Pre-run and capture, reading inputs in place, those numbered in ``copied`` from own memory on the device.

        Workspaces of libraries are made anew within the capture, so they are the graph's: one that is kept for a stream
        would be freed by whoever clears the library's, as torch.compile's CUDA graphs do. They are forgotten after it.
        """
        driver, origin = self._driver, self._streams[ORIGIN]
        copies = {number: torch.empty_like(inputs[number], device=driver.device) for number in copied}
        for number, own in copies.items():
            driver.copy(own, inputs[number])
        read = [copies.get(number, tensor) for number, tensor in enumerate(inputs)]
        begin = driver.new_event()
        driver.record(begin, driver.current_stream())
        driver.wait(begin, origin)
        with driver.random_kept(), driver.tuned():
            looked = self._look(read)
            if self._released is None:
                driver.synchronize()
                self._select(looked)
                looked = self._look(read)
                self._released = self._plan_releases(looked)
        driver.synchronize()
        del looked
        driver.forget_workspaces()
        try:
            with driver.tuned(), driver.capturing(pool, origin) as graph:
                values, held = self._run(read, self._released)
        finally:
            driver.forget_workspaces()
        results = {value: values[value] for value in self._kept}
        captured = CapturedSchedule(graph, [location_of(tensor) for tensor in read], copies, results, held)
        del values
        if self._returns_in_place:
            handles = dict.fromkeys(tensor.untyped_storage()._cdata for tensor in results.values())
            captured.counts = [(handle, count_of(handle)) for handle in handles]
        _LIVE.add(captured)
        return captured

    def _look(self, inputs: Sequence[Tensor]) -> dict[ValueId, Tensor]:
        """Pre-run on the assigned streams, where kernels compile and libraries choose; return all values."""
        return self._run(inputs, Released(((),) * len(self._program.operators), ()))[0]

    def _select(self, looked: dict[ValueId, Tensor]) -> None:
        """Measure the implementations of each convolution; equal ones on tensors of equal strides share the choice."""
        known: dict[Any, str] = {}
        for operator, function in zip(self._program.operators, self._functions, strict=True):
            if isinstance(function, SelectedConvolution):
                tensors = [looked[value] for value in operator.inputs]
                key = (repr(operator.kind), tuple((t.shape, t.stride(), t.dtype) for t in tensors))
                if key not in known:
                    function.select(self._driver.seconds, tensors)
                function.way = known.setdefault(key, function.way)

    def run_now(self, inputs: Sequence[Tensor]) -> dict[ValueId, Tensor]:
        """Return the results without a graph: run operators in order on the caller's stream, in fresh memory."""
        values: dict[ValueId, Tensor] = dict(self._program.constants)
        values.update(zip(self._program.inputs, inputs, strict=True))
        for operator, function in zip(self._program.operators, self._functions, strict=True):
            made = function(*[values[value] for value in operator.inputs])
            values.update(zip(operator.outputs, [made] if isinstance(made, Tensor) else made, strict=True))
        return {value: values[value] for value in self._kept}

    def _plan_releases(self, looked: dict[ValueId, Tensor]) -> Released:
        """Plan when memory is released, from the values that the pre-run saw share it."""
        program = self._program
        owner: dict[int, ValueId] = {}
        root = {}
        for value, tensor in looked.items():  # order of creation
            root[value] = owner.setdefault(tensor.untyped_storage()._cdata, value)
        held = {root[value] for value in (*program.inputs, *program.constants, *self._kept)}
        return plan_releases(program, self._plan, root, held)

    def _run(self, inputs: Sequence[Tensor], released: Released) -> tuple[dict[ValueId, Tensor], list[Tensor]]:
        """Run all commands in order; return the values that are left, and the tensors that must be held."""
        program, driver = self._program, self._driver
        values: dict[ValueId, Tensor] = dict(program.constants)
        values.update(zip(program.inputs, inputs, strict=True))
        events: dict[int, Handle] = {}
        for command in self._plan.commands:
            match command:
                case Run(index, stream):
                    for value in released.before[index]:
                        del values[value]
                    operator = program.operators[index]
                    arguments = [values[value] for value in operator.inputs]
                    made: Any = driver.run(self._streams[stream], self._functions[index], arguments)
                    values.update(zip(operator.outputs, [made] if isinstance(made, Tensor) else made, strict=True))
                case Record(event, stream):
                    events[event] = driver.new_event()
                    driver.record(events[event], self._streams[stream])
                case Wait(event, stream):
                    driver.wait(events[event], self._streams[stream])
        return values, [values[value] for value in released.never]
