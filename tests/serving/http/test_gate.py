from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import structlog
from fastapi import Request
from mlsys_serving.http import HttpConfig, Router, runtime_of
from mlsys_serving.http.middleware.gate import presented_keys
from starlette.websockets import WebSocket

Check = Callable[[httpx.Response, int, str], dict[str, Any]]


@pytest.fixture
def router() -> Router:
    router = Router()

    @router.get("/id")
    async def request_id(request: Request) -> dict[str, str]:
        bound = structlog.contextvars.get_contextvars()["request_id"]
        return {"state": request.state.request_id, "log": bound}

    @router.websocket("/ws")
    async def echo(socket: WebSocket) -> None:
        await socket.accept()

    return router


@pytest.mark.parametrize("given", ["abc", "A-1_2.3:4", "x" * 128])
async def test_a_good_request_id_is_kept(given: str, router: Router, make_app: Any, client_of: Any) -> None:
    async with client_of(make_app(router)) as client:
        response = await client.get("/id", headers={"x-request-id": given})
    assert response.headers["x-request-id"] == given
    assert response.json() == {"state": given, "log": given}


@pytest.mark.parametrize("given", [None, "", "x" * 129, "two words", 'quote"', "new\x7fline", "\xff"])
async def test_a_bad_or_missing_request_id_is_replaced(
    given: str | None, router: Router, make_app: Any, client_of: Any
) -> None:
    headers = {} if given is None else {"x-request-id": given.encode("latin-1")}
    app = make_app(router, app={"new_request_id": lambda: "made"})
    async with client_of(app) as client:
        response = await client.get("/id", headers=headers)
    assert response.headers["x-request-id"] == "made"
    assert "request_id" not in structlog.contextvars.get_contextvars()


async def test_an_application_cannot_send_another_id(make_app: Any, client_of: Any) -> None:
    from fastapi import Response

    router = Router()

    @router.get("/own")
    async def own() -> Response:
        return Response(headers={"x-request-id": "other"})

    async with client_of(make_app(router)) as client:
        response = await client.get("/own", headers={"x-request-id": "mine"})
    assert response.headers.get_list("x-request-id") == ["mine"]


KEYS = frozenset({"alpha", "beta-key", "schlüssel"})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer alpha"}, 200),
        ({"authorization": "bearer  beta-key "}, 200),
        ({"authorization": "Bearer schlüssel".encode()}, 200),
        ({"x-api-key": "alpha"}, 200),
        ({"authorization": "Bearer wrong", "x-api-key": "alpha"}, 200),
        ({"authorization": "Basic alpha"}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Bearer alph"}, 401),
        ({"authorization": "Bearer alphaa"}, 401),
        ({"authorization": "Bearer ALPHA"}, 401),
        ({"x-api-key": b"\xff\xfe"}, 401),
    ],
)
async def test_keys(
    headers: dict[str, str], status: int, router: Router, make_app: Any, client_of: Any, check_error: Check, log: Any
) -> None:
    async with client_of(make_app(router, api_keys=KEYS)) as client:
        response = await client.get("/id", headers=headers)
    assert response.status_code == status
    if status == 401:
        has_key = bool(
            presented_keys([(k.encode(), v if isinstance(v, bytes) else v.encode()) for k, v in headers.items()])
        )
        check_error(response, 401, "invalid_api_key" if has_key else "missing_api_key")
        assert response.headers["www-authenticate"] == ('Bearer error="invalid_token"' if has_key else "Bearer")
        assert log.events("request")[0]["route"] == "<unmatched>"
    for key in (*KEYS, "wrong", "alph"):
        assert key not in log.text


async def test_every_key_is_compared_whichever_fits(
    router: Router, make_app: Any, client_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import secrets

    compared: list[tuple[bytes, bytes]] = []
    real = secrets.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr("mlsys_serving.http.middleware.gate.secrets.compare_digest", counting)
    async with client_of(make_app(router, api_keys=KEYS)) as client:
        for key in ("alpha", "beta-key", "wrong", "a" * 5000):
            compared.clear()
            await client.get("/id", headers={"x-api-key": key})
            assert len(compared) == len(KEYS)
            assert {len(digest) for pair in compared for digest in pair} == {32}


async def test_health_and_metrics_are_open_unless_told_otherwise(make_app: Any, client_of: Any) -> None:
    async with client_of(make_app(api_keys=KEYS)) as client:
        assert [(await client.get(p)).status_code for p in ("/health/live", "/metrics", "/docs")] == [200, 200, 401]
        assert (await client.get("/health")).status_code == 401
        assert (await client.get("/metricsx")).status_code == 401
    async with client_of(make_app(api_keys=KEYS, open_paths=("/health/live",))) as client:
        assert [(await client.get(p)).status_code for p in ("/health/live", "/health/ready", "/metrics")] == [
            200,
            401,
            401,
        ]


async def test_concurrent_requests_keep_their_own_keys_and_ids(router: Router, make_app: Any, serve: Any) -> None:
    server = serve(make_app(router, api_keys=KEYS))

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        good = number % 3 != 0
        headers = {"x-request-id": f"id-{number}", "x-api-key": "alpha" if good else f"wrong{number}"}
        response = await client.get(f"{server.url}/id", headers=headers)
        assert response.status_code == (200 if good else 401)
        assert response.headers["x-request-id"] == f"id-{number}"
        if good:
            assert response.json() == {"state": f"id-{number}", "log": f"id-{number}"}

    async with httpx.AsyncClient() as client:
        await asyncio.gather(*(ask(client, number) for number in range(60)))


async def _websocket(app: Any, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    scope = {
        "type": "websocket",
        "path": "/ws",
        "headers": headers,
        "query_string": b"",
        "subprotocols": [],
        "state": {},
        "root_path": "",
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]


async def test_websockets_pass_the_same_gates(router: Router, make_app: Any) -> None:
    app = make_app(router, api_keys=KEYS)
    assert await _websocket(app, []) == {"type": "websocket.close", "code": 1008, "reason": "missing_api_key"}
    assert (await _websocket(app, [(b"x-api-key", b"alpha")]))["type"] == "websocket.accept"
    runtime_of(app).readiness.set_draining()
    refused = await _websocket(app, [(b"x-api-key", b"alpha")])
    assert (refused["type"], refused["code"]) == ("websocket.close", 1013)


async def test_a_draining_server_refuses_all_but_health(
    router: Router, make_app: Any, client_of: Any, check_error: Check
) -> None:
    app = make_app(router)
    async with client_of(app) as client:
        assert (await client.get("/id")).status_code == 200
        runtime_of(app).readiness.set_draining()
        response = await client.get("/id")
        check_error(response, 503, "shutting_down")
        assert (response.headers["retry-after"], response.headers["connection"]) == ("1", "close")
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/health/ready")).status_code == 503


PROBES = ("/health/live", "/health/ready", "/metrics", "/v2/health/live", "/v2/health/ready")


@pytest.mark.parametrize("keys", [frozenset(), KEYS])
async def test_an_orchestrator_can_watch_a_drain_by_every_probe_and_no_other_route(
    keys: frozenset[str], make_app: Any, client_of: Any
) -> None:
    from mlsys_open_inference import create_oip_app
    from mlsys_serving.models import ModelRepository

    app = create_oip_app(
        ModelRepository(),
        config=HttpConfig(api_keys=keys, open_paths=("/health/*", "/metrics", "/v2/health/*")),
        logger=runtime_of(make_app()).logger,
    )
    runtime_of(app).readiness.set_ready()
    key = {"x-api-key": "alpha"}
    async with client_of(app) as client:
        assert [(await client.get(path)).status_code for path in PROBES] == [200] * 5
        runtime_of(app).readiness.set_draining()
        after = {path: await client.get(path) for path in PROBES}
        assert [answer.status_code for answer in after.values()] == [200, 503, 200, 200, 503]
        assert after["/health/ready"].json()["status"] == "draining"
        assert after["/v2/health/ready"].json() == {"ready": False}
        assert "retry-after" not in after["/health/ready"].headers, "the probe's own answer, not the gate's"
        assert (await client.head("/health/live")).status_code == 200
        for path in ("/v2", "/v2/models/stats", "/health", "/health/live/", "/docs", "/metrics/"):
            answer = await client.get(path, headers=key)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), path


async def test_cors_is_off_by_default_and_lets_preflights_pass_the_keys(
    router: Router, make_app: Any, client_of: Any
) -> None:
    origin = {"origin": "https://a.example"}
    preflight = {**origin, "access-control-request-method": "GET", "access-control-request-headers": "authorization"}
    async with client_of(make_app(router)) as client:
        assert "access-control-allow-origin" not in (await client.get("/id", headers=origin)).headers
    app = make_app(router, api_keys=KEYS, cors_origins=("https://a.example",))
    async with client_of(app) as client:
        assert (await client.options("/id", headers=preflight)).status_code == 200
        refused = await client.get("/id", headers=origin)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
        other = await client.get("/id", headers={"origin": "https://b.example", "x-api-key": "alpha"})
        assert "access-control-allow-origin" not in other.headers


def test_the_console_log_is_readable_and_without_local_variables() -> None:
    import io

    from mlsys_serving.http.record import make_logger

    stream = io.StringIO()
    logger = make_logger("console", stream=stream)
    try:
        secret_body = "hunter2"
        raise KeyError(len(secret_body))
    except KeyError as error:
        logger.error("request failed", exc_info=error)
    assert "request failed" in stream.getvalue()
    assert "KeyError: 7" in stream.getvalue()
    assert "hunter2'" not in stream.getvalue()


def test_the_logger_leaves_the_process_wide_configuration_alone(make_app: Any) -> None:
    before = (list(logging.getLogger().handlers), structlog.is_configured())
    make_app()
    assert (list(logging.getLogger().handlers), structlog.is_configured()) == before
