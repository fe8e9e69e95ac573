"""Cost of a replay beside its kernels: a task of it, a wait for another worker, and the call from Python.

The program is a chain of copies of one number, so that kernels take next to nothing; their own time, measured alone, is
taken off. The goal is 0.3 us a task (docs/nimble.md).

    mlsys bench nimble-overhead
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import torch
from mlsys_core.profiling.turns import take_turns
from mlsys_nimble.backends.cpu.executor import NativeExecutor
from mlsys_nimble.ir.operators import Copy
from mlsys_nimble.ir.program import Operator, Program, ValueType

from mlsys_bench.harness.text import rows_section

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section


def chain(length: int) -> Program:
    """Build a chain of ``length`` copies of a number, and a second chain beside it, shared by two workers."""
    values = [ValueType((1,), "float32")] * (2 * length + 1)
    operators = [
        Operator(f"copy{index}", Copy(), (index if index < 2 else index - 1,), (index + 1,))
        for index in range(2 * length)
    ]
    return Program(tuple(values), tuple(operators), (0,), (2 * length - 1, 2 * length))


@dataclass(frozen=True, slots=True)
class Row:
    """Cost of a replay by so many workers."""

    workers: int
    tasks: int
    waits: int
    replay_us: float  # of the long chain
    call_us: float  # of a chain of one
    task_ns: float  # its kernel included
    kernel_ns: float  # by itself, with the clock's own cost


def run(context: BenchContext, *, calls: int = 200) -> Section:
    """Time ``calls`` calls of a short and a long chain."""
    torch.set_num_threads(1)
    inputs = [torch.ones(1)]
    rows = []
    for workers in (1, 2):
        short, long = (NativeExecutor(chain(length), num_threads=workers) for length in (1, 1000))
        schedule, num_calls = long.schedule, 5 if context.is_quick else calls
        replays = {"short": partial(short.run, inputs), "long": partial(long.run, inputs)}
        found = take_turns(replays, turn_s=0.0, num_rounds=num_calls // 3 + 1, idle_s=0.0)
        call, whole = (median(sample for turn in found[name] for sample in turn) for name in replays)
        per_task = (whole - call) / (schedule.num_tasks - short.schedule.num_tasks)
        kernel = sum(schedule.seconds.values()) / len(schedule.seconds)
        figures = (whole * 1e6, call * 1e6, per_task * 1e9, kernel * 1e9)
        rows.append(Row(workers, schedule.num_tasks, schedule.num_waits, *figures))
    return rows_section("Nimble: cost of a replay", rows)
