from __future__ import annotations

import gzip
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from fastapi import Request
from mlsys_serving.http import Router

Check = Callable[[httpx.Response, int, str], dict[str, Any]]
LIMIT = 1000


@pytest.fixture
def read_nbytes() -> list[int]:
    return []


@pytest.fixture
def app(make_app: Any, read_nbytes: list[int]) -> Any:
    router = Router()

    @router.post("/echo")
    async def echo(body: dict[str, Any]) -> dict[str, Any]:
        return body

    @router.post("/count")
    async def count(request: Request) -> int:
        read_nbytes.append(0)  # the handler was entered
        read_nbytes.extend([len(chunk) async for chunk in request.stream()])
        return sum(read_nbytes)

    @router.post("/ignore")
    async def ignore() -> str:
        return "not read"

    return make_app(router, max_body_nbytes=LIMIT)


async def _chunks(total_nbytes: int, chunk_nbytes: int = 100) -> AsyncIterator[bytes]:
    for start in range(0, total_nbytes, chunk_nbytes):
        yield b"x" * min(chunk_nbytes, total_nbytes - start)


@pytest.mark.parametrize(("nbytes", "status"), [(0, 200), (LIMIT, 200), (LIMIT + 1, 413)])
@pytest.mark.parametrize("chunked", [False, True])
async def test_the_limit_is_exact(
    nbytes: int, status: int, chunked: bool, app: Any, client_of: Any, check_error: Check
) -> None:
    async with client_of(app) as client:
        response = await client.post("/count", content=_chunks(nbytes) if chunked else b"x" * nbytes)
    if status == 413:
        assert "1000 bytes" in check_error(response, 413, "body_too_large")["message"]
        assert response.headers["connection"] == "close"
    else:
        assert response.json() == nbytes


async def test_a_declared_length_is_refused_before_a_byte_is_read(
    app: Any, client_of: Any, check_error: Check, read_nbytes: list[int]
) -> None:
    async with client_of(app) as client:
        for declared in (str(LIMIT + 1), "9" * 5000):
            response = await client.post("/count", content=_chunks(10), headers={"content-length": declared})
            check_error(response, 413, "body_too_large")
        assert read_nbytes == []
        for nonsense in ("-5", "many", "\N{SUPERSCRIPT TWO}"):  # not ours to judge: what arrives is counted anyway
            headers = {"content-length": nonsense.encode("latin-1")}
            assert (await client.post("/ignore", content=_chunks(10), headers=headers)).status_code == 200


async def test_json_routes_answer_413_too(app: Any, client_of: Any, check_error: Check) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"a": "'
        async for chunk in _chunks(2 * LIMIT):
            yield chunk
        yield b'"}'

    async with client_of(app) as client:
        headers = {"content-type": "application/json"}
        check_error(await client.post("/echo", content=chunks(), headers=headers), 413, "body_too_large")


def _response_head(sock: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        part = sock.recv(4096)
        if not part:
            break
        data += part
    return data


def test_a_client_that_waits_for_100_continue_gets_413_instead(app: Any, serve: Any, dial: Any) -> None:
    with dial(serve(app)) as sock:
        sock.sendall(b"POST /count HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2000\r\nexpect: 100-continue\r\n\r\n")
        assert _response_head(sock).startswith(b"HTTP/1.1 413 ")


def test_an_endless_chunked_upload_is_answered_and_closed(app: Any, serve: Any, dial: Any) -> None:
    with dial(serve(app)) as sock:
        sock.sendall(b"POST /count HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(12):
            sock.sendall(b"64\r\n" + b"x" * 100 + b"\r\n")
        response = _response_head(sock)
        assert response.startswith(b"HTTP/1.1 413 ")
        assert b"\r\nconnection: close\r\n" in response.lower()
        while True:  # what follows the head, up to the end of the connection
            try:
                if not sock.recv(4096):
                    break
            except ConnectionResetError:
                break


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_in_the_middle_of_a_large_upload_can_read_the_answer(
    chunked: bool, app: Any, serve: Any, check_error: Check
) -> None:
    server, part = serve(app), b"x" * 65536
    content = (part for _ in range(256)) if chunked else part * 256
    check_error(httpx.post(f"{server.url}/count", content=content, timeout=None), 413, "body_too_large")


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "deflate", "br", "identity, gzip", "x" * 500])
async def test_compressed_bodies_are_refused_by_name(
    encoding: str, app: Any, client_of: Any, check_error: Check
) -> None:
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    async with client_of(app) as client:
        plain = await client.post("/echo", json={"a": 1}, headers={"content-encoding": "identity"})
        response = await client.post("/echo", content=gzip.compress(b"{}"), headers=headers)
    assert plain.json() == {"a": 1}
    assert encoding.lower()[:40] in check_error(response, 415, "unsupported_encoding")["message"]
