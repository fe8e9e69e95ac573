"""``mlsys batchmaker serve --instances``: a model of cells in worker processes that are killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from mlsys_batchmaker.engine import EngineConfig
from mlsys_batchmaker.models.sequence import lstm_model
from mlsys_batchmaker.models.store import save_model
from mlsys_batchmaker.serve.instances import instance_groups, require_processes
from mlsys_core.errors import InvalidInputError
from mlsys_serving.instances.chaos import bodies, is_near, running_server, workers_of
from mlsys_serving.processes import can_supervise

pytestmark = pytest.mark.skipif(can_supervise() is not None, reason=str(can_supervise()))


def test_words_are_answered_by_processes_which_may_be_killed(tmp_path: Path):
    save_model(lstm_model(num_words=9, hidden_size=8), tmp_path / "words" / "1")
    save_model(lstm_model(num_words=9, hidden_size=8), tmp_path / "words" / "2")
    (tmp_path / "words" / "config.json").write_text('{"parameters": {"note": {"string_value": "its own"}}}')
    arguments = ["batchmaker", "serve", str(tmp_path), "--instances", "1"]
    with running_server(arguments) as (url, server), httpx.Client(base_url=url, timeout=60) as client:
        assert len(workers_of(server)) == 3  # one for each version, and one that waits
        assert client.get("/v2/models/words/config").json()["parameters"]["note"]["string_value"] == "its own"
        asked = bodies(client.get("/v2/models/words").json(), seed=0, num=4)
        found = []
        for _ in range(2):
            answers = [client.post("/v2/models/words/versions/1/infer", json=body) for body in asked]
            found.append([answer.raise_for_status().json() for answer in answers])
            for worker in workers_of(server):
                worker.kill()
        assert found[0][0]["model_version"] == "1"
        assert is_near(found[1], found[0])


def test_a_worker_that_takes_over_only_starts_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_model(lstm_model(num_words=9, hidden_size=8), tmp_path / "words")
    (group,) = instance_groups([tmp_path], EngineConfig())

    def fail(*_: object, **__: object):
        raise AssertionError("this belongs before the fork")

    monkeypatch.setattr("mlsys_batchmaker.engine.MaterialisedCell", fail)
    asyncio.run(group.build(1).close())


def test_what_cannot_be_shared_by_processes_is_refused(tmp_path: Path):
    with pytest.raises(InvalidInputError, match="there is no model"):
        instance_groups([tmp_path], EngineConfig())
    with pytest.raises(InvalidInputError, match="cannot share cuda"):
        require_processes(EngineConfig(device="cuda"))
