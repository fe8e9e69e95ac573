"""The timeline of figure 5: eight requests, batch size 4, a cell takes one unit of time.

The text gives req1 = 2, req2 = req3 = 3, req4 = 5 at time 0, a second graph batch whose longest is 7, req5 there at
time 2, req6 and req7 joining the fourth task. The other lengths and arrivals are in the drawing only; these are ours.
"""

from __future__ import annotations

import pytest
from mlsys_batchmaker.scheduling.scheduler import CellularScheduler
from mlsys_batchmaker.scheduling.state import SchedulerConfig
from mlsys_core.loop import ServeRequest, SimulatedExecutor, simulate
from mlsys_core.loop.baselines import ZeroBatch

from .cellular import chain, layout, outputs

REQUESTS = [(0, 2), (0, 3), (0, 3), (0, 5), (1.5, 3), (2.5, 7), (2.6, 4), (3.5, 1)]  # (arrival, length) of req1..req8
CELLULAR = {"1": 2, "2": 3, "3": 3, "4": 5, "5": 5, "8": 6, "7": 7, "6": 10}


@pytest.mark.parametrize("batching", ["cell", "chunk"])
def test_cellular_batching(batching: str):
    of = layout()
    scheduler = CellularScheduler(of, config=SchedulerConfig(max_tasks_to_submit=1, batching=batching))
    executor = SimulatedExecutor(lambda _: 1.0, lambda batch: outputs(batch, of))
    trace = [(at, chain(of, str(number), length)) for number, (at, length) in enumerate(REQUESTS, 1)]
    simulation = simulate(scheduler, executor, trace, request_id=lambda request: request.request_id)
    assert {served.request_id: served.finished_s for served in simulation.requests} == CELLULAR
    assert [run.batch.tasks[0].size for run in simulation.runs] == [4, 4, 4, 4, 4, 3, 2, 1, 1, 1]
    assert simulation.runs[2].started_s == 2  # req2 to req5
    assert scheduler.counters.cells == sum(length for _, length in REQUESTS)


def test_graph_batching():
    trace = [(at, ServeRequest(str(number), None, length=n)) for number, (at, n) in enumerate(REQUESTS, 1)]
    executor = SimulatedExecutor(lambda batch: float(batch.padded_length), lambda batch: [None] * batch.size)
    simulation = simulate(ZeroBatch(max_batch_size=4), executor, trace)
    assert sorted({served.finished_s for served in simulation.requests}) == [5, 12]
