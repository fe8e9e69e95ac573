"""The suite ``batchmaker-scheduling``: microseconds of CPU time a cell at 64-wide batches, with no cell computed.

For chains (LSTM), chains that wait for chains (Seq2Seq) and trees: unfolding and planning, admission, and the work
per batch, batching (``next_batch``) and completion (``complete``) together. Fails if these take 1 us a cell or more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from mlsys_batchmaker.plan import CellGraph, CellSpec, Layout, Planner, Port
from mlsys_batchmaker.scheduling.requests import CellRequest
from mlsys_batchmaker.scheduling.scheduler import CellularScheduler
from mlsys_batchmaker.scheduling.state import SchedulerConfig
from mlsys_batchmaker.scheduling.tasks import Round, RoundOutput, Task
from mlsys_core.loop import WorkerId
from mlsys_core.report import Section, Table

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

BUDGET_US = 1.0
NUM_REQUESTS = 640
H = Port("h", "float32", (8,))
C = Port("c", "float32", (8,))
WORD = Port("word", "int64", high=100)


@dataclass(frozen=True)
class Cost:
    """Microseconds of CPU time per cell."""

    unfold: float
    admit: float
    schedule: float
    width: float  # rows per task


def chains(layout: Layout, rng: np.random.Generator) -> CellGraph:
    """Return an LSTM over a sentence."""
    length = int(rng.integers(22, 27))
    graph = CellGraph(layout)
    words = rng.integers(0, 100, length)
    graph.result(graph.chain("encoder", length, each={"word": words}, carry={"h": "h", "c": "c"}).last("h"))
    return graph


def seq2seq(layout: Layout, rng: np.random.Generator) -> CellGraph:
    """Return an encoder chain, then a decoder chain that gives a word each step."""
    length = int(rng.integers(22, 27))
    graph = CellGraph(layout)
    words = rng.integers(0, 100, length)
    encoder = graph.chain("encoder", length, each={"word": words}, carry={"h": "h", "c": "c"})
    first: dict[str, Any] = {"word": 1, "h": encoder.last("h"), "c": encoder.last("c")}
    graph.result(graph.chain("decoder", length, carry={"word": "word", "h": "h", "c": "c"}, first=first))
    return graph


def trees(layout: Layout, rng: np.random.Generator) -> CellGraph:
    """Return a random binary tree."""
    count = int(np.clip(rng.lognormal(2.85, 0.45), 2, 52))
    roots = list(range(count))
    left, right = [], []
    while len(roots) > 1:
        at = int(rng.integers(0, len(roots) - 1))
        left.append(roots[at])
        right.append(roots[at + 1])
        roots[at : at + 2] = [count + len(left) - 1]
    graph = CellGraph(layout)
    graph.add_many("leaf", count, each={"word": rng.integers(0, 100, count)})
    wires = {"h1": (left, "h"), "h2": (right, "h"), "c1": (left, "c"), "c2": (right, "c")}
    graph.result(graph.add_many("inner", count - 1, wires=wires) + count - 2)
    return graph


LAYOUT = Layout(
    [
        CellSpec("encoder", (WORD, H, C), (H, C)),
        CellSpec("decoder", (WORD, H, C), (H, C, WORD), results=(2,), priority=1),
        CellSpec("leaf", (WORD,), (H, C)),
        CellSpec(
            "inner",
            (Port("h1", *H.signature), Port("h2", *H.signature), Port("c1", *C.signature), Port("c2", *C.signature)),
            (H, C),
            priority=1,
        ),
    ]
)


PLANNER = Planner(LAYOUT)
WORDS, STATES = np.zeros(4096, dtype=np.int64), np.zeros((4096, 8), dtype=np.float32)


def measure(unfold: Callable[[Layout, np.random.Generator], CellGraph], *, chunk: bool, seed: int) -> Cost:
    """Serve ``NUM_REQUESTS`` that come at once and return their costs.

    The clock of CPU time is read between phases only: a slow clock, read per task, would dominate the figures.
    """
    rng = np.random.default_rng(seed)
    times = [time.thread_time()]
    requests = []
    for number in range(NUM_REQUESTS):
        graph = unfold(LAYOUT, rng)  # structures seen before are planned already, as in a server that ran for a while
        requests.append(CellRequest(str(number), PLANNER.plan(graph), graph.constants))
    times.append(time.thread_time())
    scheduler = CellularScheduler(LAYOUT, config=SchedulerConfig(batching="chunk" if chunk else "cell"))
    for request in requests:
        scheduler.add(request, 0.0)
    times.append(time.thread_time())
    finished = 0
    while scheduler.num_unfinished:
        rounds: list[Round] = []
        while (batch := scheduler.next_batch(WorkerId(0), 0.0)) is not None:
            rounds.append(batch)
        for batch in rounds:
            output = RoundOutput([_results(task) for task in batch.tasks], 0.0, 0.0)
            finished += len(scheduler.complete(batch, output, 0.0))
    times.append(time.thread_time())
    num_cells = sum(request.plan.num_nodes for request in requests)
    assert finished == NUM_REQUESTS
    assert scheduler.counters.cells == num_cells
    unfold_us, admit_us, schedule_us = ((end - start) / num_cells * 1e6 for start, end in pairwise(times))
    return Cost(unfold_us, admit_us, schedule_us, scheduler.counters.effective_batch_size)


def _results(task: Task) -> tuple[np.ndarray, ...]:
    is_decoder = LAYOUT.cells[task.cell].name == "decoder"
    return ((WORDS if is_decoder else STATES)[: len(task.result_rows)],)


def run(context: BenchContext, *, repeats: int = 5) -> Section:
    """Measure each case with both forms of tasks; the best of some repeats.

    Args:
        context: The suite's context; quick has one repeat.
        repeats: Runs of each, with seeds of their own.
    """
    found = {}
    for name, unfold in (("chains", chains), ("seq2seq", seq2seq), ("trees", trees)):
        for tasks in ("cell", "chunk"):
            seeds = range(1 if context.is_quick else repeats)
            costs = [measure(unfold, chunk=tasks == "chunk", seed=seed) for seed in seeds]
            best = {each.name: min(map(attrgetter(each.name), costs)) for each in fields(Cost)}
            found[f"{name}, {tasks}"] = Cost(**best)
    worst = max(cost.schedule for cost in found.values())
    rows = [
        [name, f"{cost.width:.1f}", *(f"{value:.2f}" for value in (cost.unfold, cost.admit, cost.schedule))]
        for name, cost in found.items()
    ]
    columns = ["graphs, tasks", "width", "unfold and plan", "admit", "batch and complete"]
    caption = f"CPU us a cell, {NUM_REQUESTS} requests at once; the budget of the last is {BUDGET_US:g}"
    return Section(
        "BatchMaker: scheduling",
        [Table(columns, rows, caption)],
        status="ok" if worst < BUDGET_US or context.is_quick else "failed",
        data={name: asdict(cost) for name, cost in found.items()},
    )
