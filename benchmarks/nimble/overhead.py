"""Cost of a replay beside its kernels: a task of it, a wait for another worker, and the call from Python.

The program is a chain of copies of one number, so that kernels take next to nothing; their own time, measured alone, is
taken off. The goal is 0.3 us a task (docs/nimble.md).

    python benchmarks/nimble/overhead.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from mlsys_nimble.backends.cpu.executor import NativeExecutor
from mlsys_nimble.ir.operators import Copy
from mlsys_nimble.ir.program import Operator, Program, ValueType


def chain(length: int) -> Program:
    """Build a chain of ``length`` copies of a number, and a second chain beside it, shared by two workers."""
    values = [ValueType((1,), "float32")] * (2 * length + 1)
    operators = [
        Operator(f"copy{index}", Copy(), (index if index < 2 else index - 1,), (index + 1,))
        for index in range(2 * length)
    ]
    return Program(tuple(values), tuple(operators), (0,), (2 * length - 1, 2 * length))


def seconds(work: Callable[[], object], calls: int = 200) -> float:
    """Return the median seconds of single calls."""
    samples = []
    for _ in range(calls):
        begin = time.perf_counter()
        work()
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples)


def main() -> None:
    """Print the three figures."""
    torch.set_num_threads(1)
    inputs = [torch.ones(1)]
    for workers in (1, 2):
        short, long = (NativeExecutor(chain(length), num_threads=workers) for length in (1, 1000))
        pieces = [pieces for segment in long.schedule.segments for pieces in segment.assignment.lists]
        tasks, waits = long.schedule.num_tasks, long.schedule.num_waits
        alone = sum(long.schedule.seconds.values())
        call, whole = seconds(lambda: short.run(inputs)), seconds(lambda: long.run(inputs))  # noqa: B023
        print(
            f"{workers} workers: {tasks} tasks ({', '.join(str(len(list_)) for list_ in pieces)}) with {waits} waits "
            f"in {whole * 1e6:.1f} us; a call of {short.schedule.num_tasks} tasks {call * 1e6:.1f} us; "
            f"a task costs {(whole - call) / (tasks - short.schedule.num_tasks) * 1e9:.0f} ns, its kernel included "
            f"(kernels by themselves, with the clock's own cost: {alone / len(long.schedule.seconds) * 1e9:.0f} ns)"
        )


if __name__ == "__main__":
    main()
