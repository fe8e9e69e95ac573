"""Traces across Orca's processes: the front's span, and what its worker said of the request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from mlsys_serving.processes import can_supervise

from tests.collector import Collector, collecting, facts_of
from tests.orca.survival.clients import answers

pytestmark = pytest.mark.skipif(can_supervise() is not None, reason=str(can_supervise()))
BODY = {"model": "tiny", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.mark.parametrize("policy", ["chunked", "request-level"])
def test_requests_in_one_batch_name_their_neighbours(start: Any, collector: Collector, policy: str) -> None:
    with start(otlp=collector.url, policy=policy) as server:
        asyncio.run(answers(server.url, [BODY | {"prompt": prompt} for prompt in ("abcd", "dcba", "aabb")]))
        roots = collector.wait("POST /v1/completions", 3)
    assert len({span.trace_id for span in roots}) == 3
    most = 0
    for root in roots:
        (engine,) = collector.below(root).values()
        assert engine.name == "generate tiny"
        facts = facts_of(engine)
        assert (facts["gen_ai.usage.output_tokens"], facts["mlsys.finish_reason"]) == (60, "length")
        queue, run = (collector.below(engine)[name] for name in ("queue", "run"))
        ran = facts_of(run)
        assert ran["mlsys.batches"] >= 60
        most = max(most, ran["mlsys.neighbours.max"])
        assert 0 < ran["mlsys.executor_s"] <= (run.end_time_unix_nano - run.start_time_unix_nano) / 1e9
        (first,) = [event for event in run.events if event.name == "first output"]
        times = [
            root.start_time_unix_nano,
            queue.start_time_unix_nano,
            queue.end_time_unix_nano,
            run.start_time_unix_nano,
            first.time_unix_nano,
            run.end_time_unix_nano,
            root.end_time_unix_nano,
        ]
        assert times == sorted(times)
    assert most >= 1  # requests that came at a time ran at a time
    assert collector.services == {"mlsys"}


def test_a_death_is_told_in_the_trace(start: Any, collector: Collector) -> None:
    with start(otlp=collector.url, step="computed", number=9) as server:
        asyncio.run(answers(server.url, [BODY | {"prompt": "abcd"}]))
        (run,) = collector.wait("run")
    assert [event.name for event in run.events].count("worker died") == 1
    assert facts_of(run)["mlsys.batches"] >= 60
