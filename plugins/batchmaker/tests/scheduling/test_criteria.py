"""The three criteria of Algorithm 1, one by one: full batches, types that do not run, any that is ready."""

from __future__ import annotations

import pytest
from mlsys_batchmaker.plan import CellGraph, CellSpec, Layout, Planner, Port
from mlsys_batchmaker.scheduling.requests import CellRequest
from mlsys_batchmaker.scheduling.state import SchedulerConfig
from mlsys_batchmaker.scheduling.tasks import RoundOutput
from mlsys_core.loop import WorkerId

from .reference import scheduler_of

H = Port("h", "float32", (2,))
SIZES = (1, 2, 4)
LAYOUT = Layout(
    [
        CellSpec("urgent", (H,), (H,), priority=1, batch_sizes=SIZES),
        CellSpec("other", (H,), (Port("g", "float32", (2,)),), batch_sizes=SIZES),
    ]
)


class Workers:
    """Several workers and a scheduler; requests are single cells."""

    def __init__(self, *, compiled: bool) -> None:
        config = SchedulerConfig(batching="cell", max_tasks_to_submit=1)
        self.scheduler = scheduler_of(LAYOUT, config=config, devices=[0] * 4, compiled=compiled)
        self.num = 0

    def add(self, cell: str, number: int = 1) -> None:
        for _ in range(number):
            graph = CellGraph(LAYOUT)
            graph.result(graph.add(cell, {"h": [1, 2]}))
            self.scheduler.add(CellRequest(str(self.num), Planner(LAYOUT).plan(graph), graph.constants), 0.0)
            self.num += 1

    def next(self, worker: int) -> tuple[str, int] | None:
        """The cell type that a worker is given, and how many of it."""
        self.round = self.scheduler.next_batch(WorkerId(worker), 0.0)
        if self.round is None:
            return None
        (task,) = self.round.tasks
        return LAYOUT.cells[task.cell].name, task.size


@pytest.fixture(params=[True, False], ids=["compiled", "python"])
def workers(request: pytest.FixtureRequest) -> Workers:
    return Workers(compiled=request.param)


def test_a_full_batch_comes_first_whatever_runs_or_is_urgent(workers: Workers):
    workers.add("other", 5)
    assert workers.next(0) == ("other", 4)
    workers.add("other", 3)
    workers.add("urgent", 3)
    assert workers.next(1) == ("other", 4)


def test_else_a_type_that_does_not_run_before_an_urgent_one_that_does(workers: Workers):
    workers.add("urgent")
    assert workers.next(0) == ("urgent", 1)
    workers.add("urgent", 2)
    workers.add("other", 3)
    assert workers.next(1) == ("other", 3), "the second criterion: `urgent` runs, `other` does not"


def test_else_the_most_urgent_that_is_ready(workers: Workers):
    workers.add("urgent")
    workers.add("other")
    assert workers.next(0) == ("urgent", 1), "neither runs, so priority decides"
    assert workers.next(1) == ("other", 1)
    workers.add("urgent", 2)
    workers.add("other", 2)
    assert workers.next(2) == ("urgent", 2), "both run: the third criterion, by priority"
    assert workers.next(3) == ("other", 2)
    assert workers.next(0) is None


def test_a_type_that_has_ended_runs_no_more(workers: Workers):
    workers.add("urgent")
    workers.next(0)
    first = workers.round
    assert first is not None
    results = [tuple(task.out_rows.astype("float32")[:, :1].repeat(2, 1) for _ in range(1)) for task in first.tasks]
    workers.scheduler.complete(first, RoundOutput(results, 0.0, 0.0), 0.0)
    workers.add("urgent")
    workers.add("other")
    assert workers.next(1) == ("urgent", 1), "NumRunningTasks is 0 again"
