"""Deadlines, cancellation and failures, over a real socket where the client's leave matters."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import httpx
import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_serving.http import BackgroundServer
from mlsys_serving.models import ModelLoadError

SLOW = {
    "inputs": [{"name": "a", "datatype": "FP32", "shape": [1, 1], "data": [0]}],
    "parameters": {"delay_s": 3600},
}


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does; the test's own timeout ends it."""
    while not condition():
        time.sleep(0.005)


def failures(client: httpx.Client, model: str = "add") -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(f'nv_inference_request_failure{{model="{model}"')]
    return {line.split('reason="')[1].split('"')[0]: float(line.split()[-1]) for line in found}


def test_a_timeout_parameter_ends_the_request_and_cancels_the_model(make_app: Any, reference: ModuleType) -> None:
    model = reference.Add()
    with BackgroundServer(make_app([model])) as server, httpx.Client(base_url=server.url) as client:
        timeout_s, num_sent = 0.02, 0
        while len(model.requests) < 2:  # a busy machine may not come as far as the model in time
            request = SLOW | {"parameters": {"delay_s": 3600, "timeout": int(timeout_s * 1e6)}}
            response = client.post("/v2/models/add/infer", json=request)
            assert response.status_code == 504
            assert "deadline" in response.json()["error"]
            response = client.post("/v2/models/add/infer", json=SLOW, headers={"x-request-timeout-s": str(timeout_s)})
            assert response.status_code == 504
            timeout_s, num_sent = 2 * timeout_s, num_sent + 2
        until(lambda: model.num_cancelled == len(model.requests))
        assert failures(client)["REJECTED"] + failures(client)["CANCELED"] == num_sent


def test_a_client_that_leaves_cancels_its_request(make_app: Any, reference: ModuleType) -> None:
    model = reference.Add()
    with BackgroundServer(make_app([model])) as server, httpx.Client(base_url=server.url) as client:
        body = json.dumps(SLOW)
        head = f"POST /v2/models/add/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((server.address.host, server.address.port)) as connection:
            connection.sendall((head + body).encode())
            until(lambda: len(model.requests) == 1)
        until(lambda: model.num_cancelled == 1)
        assert client.get("/v2/models/add/ready").status_code == 200
        assert failures(client)["CANCELED"] == 1
        assert 'nv_inference_pending_request_count{model="add",version="1"} 0.0' in client.get("/metrics").text


def test_a_client_that_leaves_within_its_body_is_no_error(make_app: Any, log: Any) -> None:
    with BackgroundServer(make_app()) as server:
        head = (
            "POST /v2/models/add/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
            "Inference-Header-Content-Length: 10\r\n\r\n{"
        )
        with socket.create_connection((server.address.host, server.address.port)) as connection:
            connection.sendall(head.encode())
        until(lambda: '"status": 499' in log.getvalue())
    assert "request failed" not in log.getvalue()


def test_a_drain_lets_requests_finish_and_cuts_those_that_do_not(make_app: Any, reference: ModuleType) -> None:
    model = reference.Add()
    app = make_app([model], drain_timeout_s=0.1, max_body_nbytes=1000)
    server = BackgroundServer(app).start()
    with httpx.Client(base_url=server.url, timeout=None) as client:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(client.post("/v2/models/add/infer", json=SLOW)))
        thread.start()
        until(lambda: len(model.requests) == 1)
        server.stop()
        thread.join()
    assert answers[0].status_code == 503
    assert list(answers[0].json()) == ["error"]
    assert (model.num_cancelled, model.is_closed) == (1, True)


def test_a_model_that_cannot_be_loaded_ends_the_start(make_app: Any) -> None:
    class Source:
        def names(self) -> list[str]:
            return ["bad"]

        async def load(self, name: str) -> list[Any]:
            raise InvalidInputError("weights.bin is cut off")

    with pytest.raises(ModelLoadError, match=r"weights\.bin is cut off"):
        BackgroundServer(make_app([], source=Source())).start()


def test_health_is_open_and_keys_hold(make_app: Any) -> None:
    app = make_app(api_keys=frozenset({"secret"}), open_paths=("/v2/health/*",))
    with BackgroundServer(app) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/v2/health/live").status_code == 200
        assert client.get("/v2/health/ready").status_code == 200
        refused = client.get("/v2/models/add")
        assert (refused.status_code, list(refused.json())) == (401, ["error"])
        assert client.get("/v2/models/add", headers={"authorization": "Bearer secret"}).status_code == 200
