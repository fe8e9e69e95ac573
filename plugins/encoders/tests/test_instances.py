"""``mlsys dvabatch serve --instances``: an encoder in worker processes that are killed, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import numpy as np
import pytest
from mlsys_core.cli.main import run
from mlsys_dvabatch.serve.instances import instance_group
from mlsys_dvabatch.serve.preparing import Batching, prepare
from mlsys_serving.instances.chaos import ChaosServer, workers_of
from mlsys_serving.processes import can_supervise

from .test_texts import LINES, vector
from .texts import write_folder

pytestmark = pytest.mark.skipif(can_supervise() is not None, reason=str(can_supervise()))


def test_texts_are_embedded_in_processes_which_may_be_killed(tmp_path: Path):
    folder = tmp_path / "small"
    model = write_folder(folder)
    (tmp_path / "small.pbtxt").write_text("max_batch_size: 3")
    arguments = ["dvabatch", "serve", str(folder), "--instances", "2", "--max-batch", "4"]
    arguments += ["--model-configs", str(tmp_path)]
    with ChaosServer(arguments) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        assert len(workers_of(server.process)) == 3
        for _ in range(2):
            found = client.post("/v1/embeddings", json={"input": LINES}).raise_for_status().json()["data"]
            for each, line in zip(found, LINES, strict=True):
                np.testing.assert_allclose(each["embedding"], vector(model, folder, line), atol=1e-5)
            for worker in workers_of(server.process):
                worker.kill()
        assert client.post("/embed", json={"inputs": "cat " * 20}).status_code == 413
        body = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": [LINES[0]]}]}
        (output,) = client.post("/v2/models/small/infer", json=body).raise_for_status().json()["outputs"]
        np.testing.assert_allclose(output["data"], found[0]["embedding"], atol=1e-5)
        assert client.get("/v2/models/small/config").json()["max_batch_size"] == 3


def test_a_worker_that_takes_over_only_starts_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_folder(tmp_path / "small")
    batching = Batching(max_batch_size=4)
    group = instance_group(prepare(str(tmp_path / "small"), tmp_path, batching), batching)

    def fail(*_: object, **__: object):
        raise AssertionError("this belongs before the fork")

    monkeypatch.setattr("mlsys_dvabatch.stages.model.require_isolated", fail)
    monkeypatch.setattr("mlsys_encoders.loading.tokenizer_of", fail)
    model = group.build(1)
    assert model.spec is group.spec
    asyncio.run(model.close())


def test_what_cannot_be_shared_by_processes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_folder(tmp_path / "small")
    command = ["dvabatch", "serve", str(tmp_path / "small"), "--port", "0", "--instances", "2", "--model-control"]
    assert run(command) == 2
    assert "leave out --model-control" in capsys.readouterr().err
