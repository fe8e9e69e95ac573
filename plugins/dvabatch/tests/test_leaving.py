"""Requests that leave while they are at work: cancelled, too late; nobody else notices."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from mlsys_core.loop import Collector, FinishReason, ServeRequest
from mlsys_core.loop.protocols import Finished, WorkerId
from mlsys_dvabatch.engine import Engine
from mlsys_dvabatch.scheduling.policies.base import Policy
from mlsys_dvabatch.scheduling.scheduler import DvaScheduler
from mlsys_dvabatch.scheduling.tasks import StageOutput, StageTask
from mlsys_dvabatch.stages.simulated import parse_stages

from .rows import Rows

FIRST, SECOND = WorkerId(0), WorkerId(1)


def scheduler(num_stages: int, *requests: ServeRequest[Any]) -> DvaScheduler:
    made = DvaScheduler(Policy(), parse_stages(",".join(["1+0"] * num_stages)))
    for request in requests:
        made.add(request, 0.0)
    return made


def task_of(made: DvaScheduler, worker: WorkerId, now: float) -> StageTask:
    task = made.next_batch(worker, now)
    assert task is not None
    return task


def ends(finished: Any) -> dict[str, tuple[FinishReason, Any]]:
    return {each.request_id: (each.reason, each.result) for each in finished}


@pytest.mark.parametrize(("now", "is_late"), [(1.0, False), (1.5, True)])
def test_a_result_after_its_deadline_is_of_no_use(now: float, is_late: bool):
    """The loop asks for expired requests before it waits; a result can come after both."""
    made = scheduler(1, ServeRequest("a", None, deadline_s=1.0), ServeRequest("b", None, deadline_s=9.0))
    task = task_of(made, FIRST, 0.0)
    finished = made.complete(task, StageOutput(results=["A", "B"]), now)
    late = (FinishReason.EXPIRED, None) if is_late else (FinishReason.DONE, "A")
    assert ends(finished) == {"a": late, "b": (FinishReason.DONE, "B")}
    assert made.num_unfinished == 0


def test_a_late_early_exit_is_late_too():
    made = scheduler(2, ServeRequest("a", None, deadline_s=1.0), ServeRequest("b", None, deadline_s=9.0))
    task = task_of(made, FIRST, 0.0)
    finished = made.complete(task, StageOutput(exits={0: "A"}), 1.5)
    assert ends(finished) == {"a": (FinishReason.EXPIRED, None)}
    assert [request.request_id for request in task_of(made, SECOND, 1.5).requests] == ["b"]


@pytest.mark.parametrize("cause", ["cancelled", "expired"])
def test_a_request_that_leaves_at_work_leaves_with_its_stage(cause: str):
    """It is still computed, so it is still here; after the stage it is gone, and the others are where they were."""
    deadline_s = 0.5 if cause == "expired" else None
    made = scheduler(2, *(ServeRequest(n, None, deadline_s=deadline_s if n == "b" else None) for n in "abc"))
    task = task_of(made, FIRST, 0.0)
    leave = made.cancel("b", 0.5) if cause == "cancelled" else made.expire(0.5)
    assert not leave
    assert not made.cancel("b", 0.6), "it leaves once"
    assert made.num_unfinished == 3
    reason = FinishReason.CANCELLED if cause == "cancelled" else FinishReason.EXPIRED
    assert ends(made.complete(task, StageOutput(), 1.0)) == {"b": (reason, None)}
    assert made.num_unfinished == 2
    last = task_of(made, SECOND, 1.0)
    assert [request.request_id for request in last.requests] == ["a", "c"]
    assert [(source.task, source.rows) for source in last.sources] == [(task.number, (0, 2))]
    finished = made.complete(last, StageOutput(results=["A", "C"]), 2.0)
    assert ends(finished) == {"a": (FinishReason.DONE, "A"), "c": (FinishReason.DONE, "C")}


def test_a_request_that_leaves_in_the_last_stage_gets_no_result():
    made = scheduler(1, *(ServeRequest(n, None) for n in "abc"))
    task = task_of(made, FIRST, 0.0)
    assert not made.cancel("b", 0.5)
    finished = made.complete(task, StageOutput(results=["A", "B", "C"]), 1.0)
    assert ends(finished)["b"] == (FinishReason.CANCELLED, None)
    assert [ends(finished)[n] for n in "ac"] == [(FinishReason.DONE, "A"), (FinishReason.DONE, "C")]


def test_a_request_that_leaves_from_a_part_that_fails_is_cancelled_not_failed():
    made = scheduler(1, *(ServeRequest(n, None) for n in "ab"))
    task = task_of(made, FIRST, 0.0)
    made.cancel("a", 0.5)
    assert ends(made.fail(task, ValueError("no"), 1.0)) == {"a": (FinishReason.CANCELLED, None)}
    again = task_of(made, FIRST, 1.0)
    assert [request.request_id for request in again.requests] == ["b"]
    assert [each.reason for each in made.fail(again, ValueError("no"), 2.0)] == [FinishReason.FAILED]


def test_cancelling_a_running_request_of_a_real_engine():
    """The stage is held until the cancellation is in; each of the others gets its own answer."""
    entered, release, heard = threading.Event(), threading.Event(), threading.Event()

    class Held:
        num_stages = 2

        def collate(self, requests: Any, padded_length: int) -> Rows:
            return Rows(np.array([request.payload for request in requests]))

        def run(self, stage: int, values: Rows) -> Rows:
            entered.set()
            release.wait()
            return Rows(values.rows + 1)

        def results(self, values: Rows) -> list[Any]:
            return list(values.rows)

    class Listens(Collector[Any, Any]):
        def on_finished(self, finished: Finished[Any], now: float) -> None:
            super().on_finished(finished, now)
            heard.set()

    collector = Listens()
    with Engine(Held(), parse_stages("1+1,1+1"), Policy(), listener=collector) as engine:
        engine.loop.submit(ServeRequest("0", 0.0), "0")
        entered.wait()
        for number in range(1, 5):
            engine.loop.submit(ServeRequest(str(number), float(number)), str(number))
        engine.loop.cancel("0")
        engine.loop.cancel("3")
        assert not heard.wait(0), "the stage is at work, so nobody has left"
        release.set()
        assert engine.loop.drain()
    ended = collector.finished
    assert {name for name, each in ended.items() if each.reason is FinishReason.CANCELLED} == {"0", "3"}
    assert {name: float(each.result) for name, each in ended.items() if each.result is not None} == {
        "1": 3.0,
        "2": 4.0,
        "4": 6.0,
    }
