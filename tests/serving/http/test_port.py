"""A port taken before its app: refused at once if busy, and a request while models load gets an answer."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from mlsys_core.errors import ServingError
from mlsys_serving.http import BoundPort, ErrorFormat, HttpConfig, TlsConfig, create_app, serve

from tests.certificates import make_certificates
from tests.processes import reserved_port

CONFIG = HttpConfig(drain_timeout_s=0)


def test_a_busy_port_is_refused_before_anything_else() -> None:
    with BoundPort("127.0.0.1", 0, config=CONFIG) as first, pytest.raises(ServingError, match=r"in use .*--port"):
        BoundPort("127.0.0.1", first.address.port, config=CONFIG)
    BoundPort("127.0.0.1", first.address.port, config=CONFIG).close()  # given back


def test_while_models_load_only_liveness_is_well() -> None:
    keyed = HttpConfig(api_keys=frozenset({"secret"}))
    with BoundPort("127.0.0.1", 0, config=keyed) as bound, httpx.Client(base_url=bound.address.url) as client:
        live, ready = client.get("/health/live"), client.get("/health/ready")
        assert (live.status_code, live.json()) == (200, {"status": "live"})
        assert (ready.status_code, ready.json()["status"]) == (503, "starting")
        assert client.get("/v2/health/live").json() == {"live": True}
        oip_ready = client.get("/v2/health/ready")
        assert (oip_ready.status_code, oip_ready.json()) == (503, {"ready": False})
        asked = client.post("/v1/completions", json={"prompt": "x"})
        assert (asked.status_code, asked.json()["error"]["code"]) == (503, "loading")
        assert int(asked.headers["retry-after"]) > 0
        assert asked.headers["connection"] == "close"
        head = client.head("/health/ready")
        assert (head.status_code, head.content) == (503, b"")


def test_the_loading_answer_has_the_fronts_format_and_certificate(tmp_path: Any) -> None:
    files = make_certificates(tmp_path)
    config = HttpConfig(tls=TlsConfig(certificate=files.server, key=files.server_key))
    own = ErrorFormat(body=lambda info: {"error": info.message})
    import ssl

    with BoundPort("127.0.0.1", 0, config=config, error_format=own) as bound:
        response = httpx.get(f"{bound.address.url}/v2", verify=ssl.create_default_context(cafile=str(files.ca)))
    assert response.status_code == 503
    assert "loading its model" in response.json()["error"]


def test_serve_answers_while_its_app_starts_and_then_the_app_does() -> None:
    """Nobody is refused a connection, from the bind to the end."""
    may_start, seen = threading.Event(), []

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(may_start.wait)
        yield

    with BoundPort("127.0.0.1", 0, config=CONFIG) as bound:

        def ask() -> None:
            try:
                with httpx.Client(base_url=bound.address.url, timeout=60) as client:
                    while not seen or seen[-1] != "ready":
                        seen.append(client.get("/health/ready").json()["status"])
                        may_start.set()
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        ready: list[Any] = []
        thread = threading.Thread(target=ask)
        thread.start()
        try:
            code = serve(create_app(CONFIG, lifespan=lifespan), bound=bound, on_ready=ready.append)
        finally:
            may_start.set()
            thread.join()
    assert code == 0
    assert ready == [bound.address]
    assert seen[0] == "starting"
    assert seen[-1] == "ready"
    assert set(seen) == {"starting", "ready"}


def test_a_connection_made_before_the_app_starts_is_answered() -> None:
    bound = BoundPort("127.0.0.1", 0, config=CONFIG)
    with bound, socket.create_connection((bound.address.host, bound.address.port)) as early:
        httpx.get(bound.address.url + "/health/live")  # accepted after the first, so that one is in, too
        bound.close()
        early.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert early.recv(4096).startswith(b"HTTP/1.1 503 ")


def test_a_start_that_fails_gives_the_port_back() -> None:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        raise KeyError("weights")
        yield

    with reserved_port() as port:
        for _ in range(2):
            with pytest.raises(ServingError, match="weights"):
                serve(create_app(CONFIG, lifespan=lifespan), port=port)
