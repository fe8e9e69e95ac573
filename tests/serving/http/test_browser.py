"""Requests that a web page makes its visitor's browser send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import Request
from mlsys_core.errors import InvalidInputError
from mlsys_serving.http import HttpConfig, Router, ServerAddress
from mlsys_serving.http.errors import HttpError
from mlsys_serving.http.middleware.gate import BrowserGuard
from starlette.websockets import WebSocket

Check = Callable[[httpx.Response, int, str], dict[str, Any]]
JSON = {"content-type": "application/json"}


@pytest.fixture
def router() -> Router:
    router = Router()

    @router.api_route("/change", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
    async def change(request: Request) -> dict[str, int]:
        return {"length": len(await request.body())}

    @router.websocket("/ws")
    async def echo(socket: WebSocket) -> None:
        await socket.accept()

    return router


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "http://test.evil.example", "http://test:81", "http://localhost", "", "file://"],
)
async def test_pages_of_other_origins_change_nothing(
    method: str, origin: str, router: Router, make_app: Any, client_of: Any, check_error: Check
) -> None:
    async with client_of(make_app(router)) as client:
        response = await client.request(method, "/change", headers={"origin": origin})
        check_error(response, 403, "origin_not_allowed")


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        (None, ()),
        ("http://test", ()),  # our own pages
        ("https://test", ()),  # behind a proxy that ends TLS
        ("https://a.example", ("https://a.example",)),
        ("https://a.example", ("*",)),
        ("null", ("*",)),
    ],
)
async def test_programs_own_pages_and_allowed_origins_pass(
    origin: str | None, allowed: tuple[str, ...], router: Router, make_app: Any, client_of: Any
) -> None:
    headers = JSON if origin is None else {**JSON, "origin": origin}
    async with client_of(make_app(router, cors_origins=allowed)) as client:
        response = await client.post("/change", content=b"{}", headers=headers)
        assert response.json() == {"length": 2}


async def test_reading_needs_no_origin_and_a_key_does_not_replace_one(
    router: Router, make_app: Any, client_of: Any, check_error: Check
) -> None:
    evil = {"origin": "https://evil.example"}
    async with client_of(make_app(router, api_keys=frozenset({"k"}))) as client:
        assert (await client.get("/change", headers={**evil, "x-api-key": "k"})).status_code == 200
        check_error(await client.post("/change", headers={**evil, "x-api-key": "k"}), 403, "origin_not_allowed")


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "Text/Plain; charset=utf-8", "multipart/form-data; boundary=x"],
)
async def test_types_that_pages_send_unasked_are_refused(
    content_type: str, router: Router, make_app: Any, client_of: Any, check_error: Check
) -> None:
    async with client_of(make_app(router)) as client:
        response = await client.post("/change", content=b"{}", headers={"content-type": content_type})
        check_error(response, 415, "unsupported_media_type")

        async def chunks() -> Any:
            yield b"{}"

        response = await client.post("/change", content=chunks(), headers={"content-type": content_type})
        check_error(response, 415, "unsupported_media_type")
        empty = await client.post("/change", headers={"content-type": content_type})
        assert empty.status_code == 200, "there is nothing to take for JSON"


@pytest.mark.parametrize(
    "content_type", [None, "application/json", "application/octet-stream", "application/x-www-form-urlencoded"]
)
async def test_other_types_are_for_the_routes_to_judge(
    content_type: str | None, router: Router, make_app: Any, client_of: Any
) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    async with client_of(make_app(router)) as client:
        assert (await client.post("/change", content=b"{}", headers=headers)).status_code == 200


LOOPBACK, ALL = ServerAddress("127.0.0.1", 8000), ServerAddress("0.0.0.0", 8000)


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        ("127.0.0.1:8000", True),
        ("127.0.0.1", True),
        ("[::1]:8000", True),
        ("::1", True),
        ("10.1.2.3:80", True),
        ("localhost:8000", True),
        ("LocalHost", True),
        ("app.localhost:80", True),
        ("models.lan:8000", True),
        ("MODELS.lan", True),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("evillocalhost", False),
        ("127.0.0.1.evil.example:8000", False),
        ("models.lan.evil.example", False),
        ("evil.example:80:80", False),
        ("[::1", False),
        (":8000", False),
        ("evil.example\x80", False),
    ],
)
def test_names_that_were_rebound_to_a_loopback_address_are_refused(host: str, is_known: bool) -> None:
    guard = BrowserGuard(allowed_hosts=["models.lan"])
    guard.listens_on(LOOPBACK)
    headers = [(b"host", host.encode("latin-1"))]
    if is_known:
        guard.check("GET", headers)
        guard.check("POST", headers)
    else:
        for method in ("GET", "POST", "WEBSOCKET"):
            with pytest.raises(HttpError, match=r"does not answer to the name .*--allowed-host"):
                guard.check(method, headers)


def test_hosts_are_checked_on_loopback_addresses_or_if_names_are_given() -> None:
    evil = [(b"host", b"evil.example")]
    guard = BrowserGuard()
    guard.check("GET", evil)  # before it is known where the server listens: in-process clients
    guard.listens_on(ALL)
    guard.check("GET", evil)  # it may well be this server's name
    guard.listens_on(ServerAddress("::1", 1))
    with pytest.raises(HttpError):
        guard.check("GET", evil)
    named = BrowserGuard(allowed_hosts=["a.example"])
    named.listens_on(ALL)
    with pytest.raises(HttpError):
        named.check("GET", evil)
    anything = BrowserGuard(allowed_hosts=["*"])
    anything.listens_on(LOOPBACK)
    anything.check("GET", evil)


def test_a_real_server_refuses_a_rebound_name(router: Router, make_app: Any, serve: Any, check_error: Check) -> None:
    server = serve(make_app(router))
    for path in ("/change", "/metrics", "/docs"):
        response = httpx.get(f"{server.url}{path}", headers={"host": f"evil.example:{server.address.port}"})
        check_error(response, 403, "host_not_allowed")
    assert httpx.get(f"{server.url}/change").status_code == 200
    origin = {"origin": server.url}
    assert httpx.post(f"{server.url}/change", headers=origin).status_code == 200, "the server's own pages"


async def test_websockets_of_other_origins_are_refused(router: Router, make_app: Any) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"test"), (b"origin", b"https://evil.example")]
    scope = {"type": "websocket", "path": "/ws", "headers": headers, "query_string": b"", "subprotocols": []}
    await make_app(router)({**scope, "state": {}, "root_path": ""}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008, "reason": "origin_not_allowed"}]


@pytest.mark.parametrize(
    "origin", ["example.org", "https://", "https://a.example/", "https://A.example", "https://*.example", ""]
)
def test_an_origin_that_no_browser_sends_is_refused_as_a_setting(origin: str) -> None:
    with pytest.raises(InvalidInputError):
        HttpConfig(cors_origins=(origin,))
