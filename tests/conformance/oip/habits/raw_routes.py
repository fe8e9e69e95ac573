"""Routes, methods, headers and encodings of REST: what a proxy, a script or a curious person sends."""

from __future__ import annotations

import gzip
import http.client
import json
import zlib
from typing import Any

from tests.conformance.oip.habits.case import Case, Server
from tests.conformance.oip.habits.raw_http import ADD, ask, infer, tensor

BODY = infer(tensor())
LARGE = infer(tensor(values=[1] * 1000, shape=[1, 1000]))
TEXT = b'{"text_input":"hello"}'

# Name: (method, path, body, headers)
REQUESTS: dict[str, tuple[str, str, bytes, dict[str, str]]] = {
    "infer by GET": ("GET", ADD, b"", {}),
    "infer by PUT": ("PUT", ADD, BODY, {}),
    "a version": ("POST", "/v2/models/add/versions/1/infer", BODY, {}),
    "an unknown version": ("POST", "/v2/models/add/versions/9/infer", BODY, {}),
    "a version that is no number": ("POST", "/v2/models/add/versions/x/infer", BODY, {}),
    "a version 0": ("POST", "/v2/models/add/versions/0/infer", BODY, {}),
    "a version with a zero before it": ("POST", "/v2/models/add/versions/01/infer", BODY, {}),
    "a negative version": ("POST", "/v2/models/add/versions/-1/infer", BODY, {}),
    "an empty version": ("POST", "/v2/models/add/versions//infer", BODY, {}),
    "the greatest version is asked": ("POST", "/v2/models/versioned/infer", infer(tensor("x", [1], shape=[1])), {}),
    "a version that is not the greatest": (
        "POST",
        "/v2/models/versioned/versions/1/infer",
        infer(tensor("x", [1], shape=[1])),
        {},
    ),
    "an unknown model": ("POST", "/v2/models/nope/infer", BODY, {}),
    "a model that is not of this case": ("POST", "/v2/models/ADD/infer", BODY, {}),
    "a model in escapes": ("POST", "/v2/models/%61dd/infer", BODY, {}),
    "an empty model": ("POST", "/v2/models//infer", BODY, {}),
    "a decoupled model": (
        "POST",
        "/v2/models/repeat/infer",
        infer(tensor("text", ["x"], shape=[1], datatype="BYTES")),
        {},
    ),
    "a model that fails": ("POST", "/v2/models/broken/infer", infer(tensor("x", [1], shape=[1])), {}),
    "a query after the path": ("POST", f"{ADD}?x=1", BODY, {}),
    "a slash after the path": ("POST", f"{ADD}/", BODY, {}),
    "an unknown path": ("GET", "/v2/nope", b"", {}),
    "the root": ("GET", "/", b"", {}),
    "version 1 of the protocol": ("POST", "/v1/models/add:predict", BODY, {}),
    "a text as the body's type": ("POST", ADD, BODY, {"Content-Type": "text/plain"}),
    "a form as the body's type": ("POST", ADD, BODY, {"Content-Type": "application/x-www-form-urlencoded"}),
    "JSON with a charset": ("POST", ADD, BODY, {"Content-Type": "application/json; charset=utf-8"}),
    "another Accept": ("POST", ADD, BODY, {"Accept": "text/html"}),
    "gzip": ("POST", ADD, gzip.compress(BODY), {"Content-Encoding": "gzip"}),
    "deflate": ("POST", ADD, zlib.compress(BODY), {"Content-Encoding": "deflate"}),
    "identity": ("POST", ADD, BODY, {"Content-Encoding": "identity"}),
    "an unknown encoding": ("POST", ADD, BODY, {"Content-Encoding": "br"}),
    "gzip that is none": ("POST", ADD, BODY, {"Content-Encoding": "gzip"}),
    "gzip that is cut": ("POST", ADD, gzip.compress(BODY)[:-9], {"Content-Encoding": "gzip"}),
    "a small answer that may be gzip": ("POST", ADD, BODY, {"Accept-Encoding": "gzip"}),
    "a large answer that may be gzip": ("POST", ADD, LARGE, {"Accept-Encoding": "gzip"}),
    "a large answer that may be deflate": ("POST", ADD, LARGE, {"Accept-Encoding": "deflate"}),
    "a large answer that may be either": ("POST", ADD, LARGE, {"Accept-Encoding": "gzip, deflate, br"}),
    "a large answer of an unknown encoding": ("POST", ADD, LARGE, {"Accept-Encoding": "br"}),
    "live": ("GET", "/v2/health/live", b"", {}),
    "ready": ("GET", "/v2/health/ready", b"", {}),
    "ready by HEAD": ("HEAD", "/v2/health/ready", b"", {}),
    "ready by POST": ("POST", "/v2/health/ready", b"", {}),
    "a model's readiness": ("GET", "/v2/models/add/ready", b"", {}),
    "a version's readiness": ("GET", "/v2/models/add/versions/1/ready", b"", {}),
    "readiness of an unknown model": ("GET", "/v2/models/nope/ready", b"", {}),
    "readiness of an unknown version": ("GET", "/v2/models/add/versions/9/ready", b"", {}),
    "metadata": ("GET", "/v2/models/add", b"", {}),
    "metadata of a version": ("GET", "/v2/models/versioned/versions/2", b"", {}),
    "metadata of all versions": ("GET", "/v2/models/versioned", b"", {}),
    "metadata of an unknown model": ("GET", "/v2/models/nope", b"", {}),
    "metadata of an unknown version": ("GET", "/v2/models/add/versions/9", b"", {}),
    "metadata of a version that is no number": ("GET", "/v2/models/add/versions/x", b"", {}),
    "metadata by POST": ("POST", "/v2/models/add", b"", {}),
    "configuration of an unknown model": ("GET", "/v2/models/nope/config", b"", {}),
    "configuration of an unknown version": ("GET", "/v2/models/add/versions/9/config", b"", {}),
    "statistics of an unknown model": ("GET", "/v2/models/nope/stats", b"", {}),
    "statistics of an unknown version": ("GET", "/v2/models/add/versions/9/stats", b"", {}),
    "a repository's index by GET": ("GET", "/v2/repository/index", b"", {}),
    "a repository's index with no JSON": ("POST", "/v2/repository/index", b"x", {}),
    "a model's index": ("POST", "/v2/repository/models/add", b"", {}),
}


def _server(server: Server) -> Any:
    [status, found] = ask(server, "GET", "/v2")
    return [status, sorted(found), len(found["version"]) > 0]


def _chunked(server: Server) -> Any:
    """Send a body of unknown length, in chunks."""
    host, _, port = server.http.partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request("POST", ADD, iter([BODY[:10], BODY[10:]]), {}, encode_chunked=True)
    response = connection.getresponse()
    found = [response.status, json.loads(response.read())]
    connection.close()
    return found


def _continued(server: Server) -> Any:
    """Ask before sending the body, as curl does with large ones."""
    import socket

    host, _, port = server.http.partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = f"POST {ADD} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(BODY)}\r\nExpect: 100-continue\r\n\r\n"
        connection.sendall(head.encode())
        first = connection.recv(4096).split(b"\r\n")[0]
        connection.sendall(BODY)
        received = b""
        while b"outputs" not in received:
            received += connection.recv(65536)
    return [first.split()[1].decode(), b"200" in received]


def _kept_alive(server: Server) -> Any:
    """Ask twice on one connection, with an error between."""
    host, _, port = server.http.partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    statuses = []
    for path, body in ((ADD, BODY), ("/v2/models/nope/infer", BODY), (ADD, b"{"), (ADD, BODY)):
        connection.request("POST", path, body)
        response = connection.getresponse()
        response.read()
        statuses.append([response.status // 100, response.will_close])
    connection.close()
    return statuses


def cases() -> list[Case]:
    """Return all of them."""
    found = [
        Case(f"REST: {name}", lambda server, request=request: ask(server, *request))
        for name, request in REQUESTS.items()
    ]
    named = {
        "the server's metadata": _server,
        "a body in chunks": _chunked,
        "a body that waits for 100-continue": _continued,
        "a connection that is kept after errors": _kept_alive,
    }
    return found + [Case(f"REST: {name}", run) for name, run in named.items()]
