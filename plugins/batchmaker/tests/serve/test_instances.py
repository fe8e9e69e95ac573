"""``mlsys batchmaker serve --instances``: a model of cells in worker processes that are killed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from mlsys_batchmaker.engine import EngineConfig
from mlsys_batchmaker.models.sequence import lstm_model
from mlsys_batchmaker.models.store import save_model
from mlsys_batchmaker.serve.app import instance_groups
from mlsys_core.errors import InvalidInputError
from mlsys_serving.instances import require_processes
from mlsys_serving.instances.chaos import ChaosServer, bodies, is_near, workers_of
from mlsys_serving.processes import can_supervise

pytestmark = pytest.mark.skipif(can_supervise() is not None, reason=str(can_supervise()))


def test_words_are_answered_by_processes_which_may_be_killed(tmp_path: Path):
    save_model(lstm_model(num_words=9, hidden_size=8), tmp_path / "words" / "1")
    save_model(lstm_model(num_words=9, hidden_size=8), tmp_path / "words" / "2")
    queue = {"default_timeout_microseconds": 1, "allow_timeout_override": True}
    (tmp_path / "words" / "config.json").write_text(json.dumps({"dynamic_batching": {"default_queue_policy": queue}}))
    arguments = ["batchmaker", "serve", str(tmp_path), "--instances", "1"]
    with ChaosServer(arguments) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        assert len(workers_of(server.process)) == 3  # one for each version, and one that waits
        asked = bodies(client.get("/v2/models/words").json(), seed=0, num=4)
        late = client.post("/v2/models/words/infer", json=asked[0])
        assert late.status_code == 504, "the model's own file is read"
        asked = [{**body, "parameters": {"timeout": 60_000_000}} for body in asked]
        found = []
        for _ in range(2):
            answers = [client.post("/v2/models/words/versions/1/infer", json=body) for body in asked]
            found.append([answer.raise_for_status().json() for answer in answers])
            for worker in workers_of(server.process):
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
        require_processes("cuda")
