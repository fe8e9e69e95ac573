"""Release of memory while a schedule is captured: by happens-before, not by program order.

torch's allocator gives a freed block to the next allocation on the stream that it was allocated on. In program order
another stream may still read it then. So a value is released just before the first operator on its own stream that all
its readers surely precede; the next owner of the block runs later still.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from mlsys_nimble.backends.cuda.plan import Run, StreamPlan, happens_before
from mlsys_nimble.ir.program import Program, ValueId
from mlsys_nimble.planning.streams import Bits

ALIGNMENT = 512  # bytes; torch rounds its blocks up to it


@dataclass(frozen=True, slots=True)
class Released:
    """Values to release; all that share a block are released at once."""

    before: tuple[tuple[ValueId, ...], ...]  # by operator: values released before it runs
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
    waiting: dict[int, list[ValueId]] = {}  # by stream: roots not released yet
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
