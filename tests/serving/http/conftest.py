"""Fixtures: apps with a captured log, an in-process client, a real server, raw sockets."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from mlsys_serving.http import BackgroundServer, HttpConfig, Router, create_app
from mlsys_serving.http.record import make_logger


@dataclass
class CapturedLog:
    stream: io.StringIO = field(default_factory=io.StringIO)

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.text.splitlines()]
        return [line for line in lines if line["event"] == name]


@pytest.fixture
def log() -> CapturedLog:
    return CapturedLog()


@pytest.fixture
def make_app(log: CapturedLog) -> Callable[..., FastAPI]:
    """``make_app(router, config_field=..., app={create_app options})``."""

    def make(router: Router | None = None, *, app: dict[str, Any] | None = None, **config: Any) -> FastAPI:
        options: dict[str, Any] = {"logger": make_logger("json", stream=log.stream)} | (app or {})
        return create_app(HttpConfig(**config), routers=[] if router is None else [router], **options)

    return make


@pytest.fixture
def client_of() -> Callable[[FastAPI], httpx.AsyncClient]:
    """An in-process client: no socket, no server."""

    def client(app: FastAPI) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")

    return client


@pytest.fixture
def serve() -> Iterator[Callable[[FastAPI], BackgroundServer]]:
    """A real server; what still runs at the test's end is cut at once."""
    servers: list[BackgroundServer] = []

    def start(app: FastAPI) -> BackgroundServer:
        servers.append(BackgroundServer(app, drain_timeout_s=0).start())
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def dial() -> Callable[[BackgroundServer], Any]:
    """``with dial(server) as sock``: a raw connection."""

    @contextmanager
    def connect(server: BackgroundServer) -> Iterator[socket.socket]:
        with socket.create_connection((server.address.host, server.address.port)) as sock:
            yield sock

    return connect


def _check_error(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"type", "code", "message", "param", "request_id"}
    assert error["code"] == code
    assert error["message"]
    assert error["request_id"] == response.headers["x-request-id"]
    return error


@pytest.fixture
def check_error() -> Callable[[httpx.Response, int, str], dict[str, Any]]:
    """Assert that a response is the documented error; returns its inner object."""
    return _check_error
