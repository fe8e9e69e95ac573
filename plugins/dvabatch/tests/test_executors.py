"""Executors and runner: threads that really run, streams against a recording device, activations dropped in time."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from mlsys_core.device import get_device
from mlsys_core.loop import Collector, FinishReason, ServeRequest
from mlsys_dvabatch.engine import Engine
from mlsys_dvabatch.executors.runner import StageRunner
from mlsys_dvabatch.executors.stage_executors import StreamExecutor
from mlsys_dvabatch.scheduling.policies.base import Mode, Policy
from mlsys_dvabatch.scheduling.policies.load import EarlyExitPolicy, LoadPolicy
from mlsys_dvabatch.scheduling.policies.operator import OperatorPolicy
from mlsys_dvabatch.scheduling.table import Part
from mlsys_dvabatch.scheduling.tasks import Source, StageOutput, StageTask
from mlsys_dvabatch.stages.activations import Padded
from mlsys_dvabatch.stages.simulated import parse_stages
from mlsys_serving.isolation import is_finite

COSTS = parse_stages("1+1,1+1,1+1")


class Adds:
    """Three stages, each adds one; keeps who ran where."""

    num_stages = 3

    def __init__(self) -> None:
        self.threads: dict[int, set[str]] = {}

    def collate(self, requests: Any, padded_length: int) -> Padded:
        return Padded({"x": torch.stack([request.payload for request in requests])})

    def run(self, stage: int, values: Padded) -> Padded:
        self.threads.setdefault(stage, set()).add(threading.current_thread().name)
        x = values.tensors["x"]
        if bool((x < 0).any()):
            raise ValueError("a negative value")
        return Padded({"x": x + 1})

    def results(self, values: Padded) -> list[Any]:
        return list(values.tensors["x"].clone())

    def inspect(self, stage: int, values: Padded) -> tuple[dict[int, Any], dict[int, int]]:
        x = values.tensors["x"]
        exits = {row: x[row].clone() for row in range(len(x)) if stage == 0 and float(x[row]) > 100}
        skip_to = {row: 2 for row in range(len(x)) if stage == 0 and 50 < float(x[row]) <= 100}
        return exits, skip_to


@pytest.mark.parametrize("mode", ["literal", "cost-aware"])
@pytest.mark.parametrize("policy", [Policy, OperatorPolicy, LoadPolicy])
def test_an_engine_answers_each_with_its_own(policy: type[Policy], mode: Mode):
    model, collector = Adds(), Collector[Any, Any]()
    with Engine(model, COSTS, policy(mode=mode), listener=collector, num_threads=1) as engine:
        for number in range(40):
            engine.loop.submit(ServeRequest(str(number), torch.tensor(float(number))), str(number))
        assert engine.loop.drain(600)
    assert {name: float(f.result) for name, f in collector.finished.items()} == {str(n): n + 3 for n in range(40)}
    if mode == "literal":
        assert model.threads == {stage: {f"stage-{stage}"} for stage in range(3)}
    else:  # a run of several stages is its first executor's
        assert all(f"stage-{later}" not in model.threads[0] for later in (1, 2))
    assert sum(meter.num_rows for meter in engine.runner.meters) == 120
    assert engine.runner.num_kept <= 2


def test_one_poisoned_request_fails_alone():
    collector = Collector[Any, Any]()
    with Engine(Adds(), COSTS, OperatorPolicy(), listener=collector, num_threads=1) as engine:
        for number in range(9):
            value = -5.0 if number == 4 else float("inf") if number == 6 else float(number)
            engine.loop.submit(ServeRequest(str(number), torch.tensor(value)), str(number))
        assert engine.loop.drain(600)
    failed = {name: str(f.error) for name, f in collector.finished.items() if f.reason is FinishReason.FAILED}
    assert failed == {"4": "a negative value"}
    assert float(collector.finished["6"].result) == float("inf"), "an answer as others are"


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_an_answer_in_several_parts_is_finite_if_all_are(make: Any):
    good, bad = make([1.0, 2.0]), make([1.0, np.nan])
    assert [is_finite(each) for each in ((good, good), (good, bad), {"only": bad})] == [True, False, False]


def test_early_exits_and_skips_of_a_real_run():
    collector = Collector[Any, Any]()
    with Engine(Adds(), COSTS, EarlyExitPolicy(), listener=collector, num_threads=1) as engine:
        for name, value in {"plain": 1.0, "skips": 60.0, "leaves": 200.0}.items():
            engine.loop.submit(ServeRequest(name, torch.tensor(value)), name)
        assert engine.loop.drain(600)
    results = {name: float(finished.result) for name, finished in collector.finished.items()}
    assert results == {"plain": 4.0, "skips": 62.0, "leaves": 201.0}


def task(number: int, stage: int, pair: int, *, sources: tuple[Source, ...] = (), is_last: bool = False) -> StageTask:
    request = ServeRequest("a", torch.tensor(1.0))
    return StageTask(number, stage, stage, Part(0, 0, ("a",)), (request,), 1, pair, sources, is_last=is_last)


def test_the_runner_gathers_and_drops():
    runner = StageRunner(Adds())
    runner.run(task(0, 0, 0))
    runner.run(task(1, 0, 0))
    merged = StageTask(
        2,
        1,
        1,
        Part(0, 0, ("a", "b")),
        (ServeRequest("a", None), ServeRequest("b", None)),
        1,
        0,
        (Source(0, (0,)), Source(1, (0,))),
    )
    assert merged.gathers
    runner.run(merged)
    assert runner.num_kept == 3
    last = StageTask(3, 2, 2, merged.part, merged.requests, 1, 0, (Source(2, (0, 1)),), drops=(0, 1), is_last=True)
    assert not last.gathers
    assert [float(value) for value in runner.run(last).results] == [4.0, 4.0]
    assert runner.num_kept == 1


def test_a_run_of_several_stages_is_metered_by_stage():
    runner = StageRunner(Adds())
    request = ServeRequest("a", torch.tensor(1.0))
    whole = StageTask(0, 0, 2, Part(0, 0, ("a",)), (request,), 1, 0, (), is_last=True)
    assert [float(value) for value in runner.run(whole).results] == [4.0]
    assert [meter.num_tasks for meter in runner.meters] == [1, 1, 1]
    assert runner.num_kept == 0


class Recorder:
    """A device that only records the calls to its streams."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._streams = self._events = 0

    def stream(self) -> RecordedStream:
        self._streams += 1
        return RecordedStream(self, f"s{self._streams - 1}")

    def event(self, *, timing: bool = False) -> str:
        self._events += 1
        return f"e{self._events - 1}"


class RecordedStream:
    def __init__(self, device: Recorder, name: str) -> None:
        self.device, self.name = device, name

    def submit(self, fn: Any, *args: Any) -> None:
        self.device.log.append(f"{self.name} runs")
        fn(*args)

    def record(self, event: str) -> None:
        self.device.log.append(f"{self.name} records {event}")

    def wait(self, event: str) -> None:
        self.device.log.append(f"{self.name} waits for {event}")

    def synchronize(self) -> None:
        self.device.log.append(f"{self.name} is waited for")

    def close(self) -> None:
        self.device.log.append(f"{self.name} closes")


def test_streams_wait_for_the_events_of_their_pairs():
    """Section 6.3: a stream each, an event for each pair, recorded at the launch, waited for on the device."""
    device, events = Recorder(), {}

    def run(task: StageTask) -> StageOutput:
        return StageOutput(results=[None] if task.is_last else ())

    first, second = (StreamExecutor(stage, run, device=device, events=events) for stage in range(2))
    for executor, given in (
        (first, task(0, 0, pair=0)),
        (second, task(1, 1, pair=0, is_last=True)),
        (first, task(2, 0, pair=1)),
        (first, task(3, 0, pair=0)),
    ):
        executor.submit(given)
        batch, output = executor.wait(600)
        assert batch is given
        assert isinstance(output, StageOutput)
    first.close()
    second.close()
    assert device.log == [
        "s0 runs",
        "s0 records e0",
        "s1 waits for e0",  # what it reads was written
        "s1 runs",
        "s1 records e1",
        "s1 is waited for",  # only the last stage
        "s0 runs",  # another pair: waits for nobody
        "s0 records e2",
        "s0 waits for e1",  # what it overwrites was read
        "s0 runs",
        "s0 records e0",
        "s0 closes",
        "s1 closes",
    ]


def test_the_stream_executors_serve_on_the_cpu_device():
    """The same semantics on real streams: those of the CPU are worker threads."""
    collector = Collector[Any, Any]()
    with Engine(Adds(), COSTS, LoadPolicy(), listener=collector, device=get_device("cpu")) as engine:
        for number in range(20):
            engine.loop.submit(ServeRequest(str(number), torch.tensor(float(number))), str(number))
        assert engine.loop.drain(600)
    assert {name: float(f.result) for name, f in collector.finished.items()} == {str(n): n + 3 for n in range(20)}
