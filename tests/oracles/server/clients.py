"""Clients that nobody wrote for this project, and those that wish it ill, against a server as a user starts it.

Schemathesis and ``tritonclient`` write into the headers that they are given, so each call gets a copy.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import httpx
import numpy as np
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from tests.oracles.server.servers import KEY, Running
from tests.oracles.tally import Tally

KEYED = MappingProxyType({"x-api-key": KEY})
_OPEN = ("/health", "/health/live", "/health/ready", "/metrics", "/v2/health/live", "/v2/health/ready")
_SAID_NO = (501, 503, 504)  # not offered, no room, too late: documented answers of a server


def documented_requests(server: Running, tally: Tally, *, examples: int) -> None:
    """Whatever its OpenAPI document allows, by schemathesis: a documented answer with the key, 401 without."""
    trusted = str(server.files.ca)
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json", headers=dict(KEYED), verify=trusted)
    with requests.Session() as session:
        for result in schema.get_all_operations():
            operation = result.ok()
            if operation.path.endswith("/unload"):
                continue  # tried by itself: what follows needs the model

            @given(case=operation.as_strategy())
            @settings(
                max_examples=examples,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            def ask(case: Any) -> None:
                _ask(case, session, server, tally)

            ask()


def _ask(case: Any, session: requests.Session, server: Running, tally: Tally) -> None:
    what, trusted = f"{server.kind} {case.method} {case.path}", str(server.files.ca)
    answer = case.call(session=session, headers={**(case.headers or {}), **KEYED}, timeout=None, verify=trusted)
    status = answer.status_code
    if (status >= 500 and status not in _SAID_NO) or "Traceback" in answer.text:
        tally.add("raw", f"{what}: {status} {answer.text[:200]}")
        return
    try:
        case.validate_response(answer, checks=[status_code_conformance, response_schema_conformance])
    except Exception as error:  # noqa: BLE001  (a group of schemathesis' own)
        tally.add("wrong", f"{what}: {status}: {str(error)[:300]}")
    else:
        tally.add("equal" if status < 400 else "refused", what)
    if case.path not in _OPEN:
        stranger = case.call(session=session, timeout=None, verify=trusted)
        tally.check(stranger.status_code == 401, f"{what} without a key: {stranger.status_code}", verdict="refused")


def triton_clients(server: Running, tally: Tally) -> None:
    """``tritonclient`` over HTTPS and gRPC with TLS: the same answers by both; refused without the key or trust."""
    import tritonclient.grpc as grpcclient
    import tritonclient.http as httpclient

    array = np.array([1, 4, 2, 0], np.int64) if server.kind == "batchmaker" else np.ones((2, 4), np.float32)
    host = server.url.removeprefix("https://")
    with ExitStack() as stack:
        # Its way to name an authority is that of ssl.wrap_socket.
        over_http = stack.enter_context(
            httpclient.InferenceServerClient(host, ssl=True, ssl_context_factory=server.context)
        )
        over_grpc = stack.enter_context(
            grpcclient.InferenceServerClient(server.grpc, ssl=True, root_certificates=str(server.files.ca))
        )
        answers = []
        metadata = over_http.get_model_metadata("tiny", headers=dict(KEYED))
        name, output = metadata["inputs"][0]["name"], metadata["outputs"][0]["name"]
        for module, client in ((httpclient, over_http), (grpcclient, over_grpc)):
            api = module.__name__
            for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
                for _ in range(5):
                    given_input = module.InferInput(name, list(array.shape), _triton_type(array))
                    given_input.set_data_from_numpy(array)
                    answers.append(client.infer("tiny", [given_input], headers=dict(headers)).as_numpy(output))
                    # Rows may be computed together or one by one: equal but for rounding.
                    is_same = np.allclose(answers[-1], answers[0], rtol=1e-5, atol=1e-6)
                    tally.check(is_same, f"{api}: {answers[-1]} after {answers[0]}")
                tally.check(client.is_model_ready("tiny", headers=dict(headers)), f"{api}: not ready")
                client.unload_model("tiny", headers=dict(headers))
                tally.check(not client.is_model_ready("tiny", headers=dict(headers)), f"{api}: ready though unloaded")
                client.load_model("tiny", headers=dict(headers))
                tally.check(client.is_model_ready("tiny", headers=dict(headers)), f"{api}: unloaded for good")
            for headers in ({}, {"x-api-key": KEY.upper()}, {"authorization": f"Basic {KEY}"}):
                for call in (client.get_server_metadata, client.get_model_repository_index):
                    _refused(lambda call=call, headers=headers: call(headers=dict(headers)), f"{api} {headers}", tally)
        strangers = [
            (httpclient, httpclient.InferenceServerClient(host)),  # plain HTTP
            (httpclient, httpclient.InferenceServerClient(host, ssl=True)),  # trusts others
            (grpcclient, grpcclient.InferenceServerClient(server.grpc)),
            (grpcclient, grpcclient.InferenceServerClient(server.grpc, ssl=True)),
        ]
        for module, client in strangers:
            stack.enter_context(client)
            _refused(lambda client=client: client.get_server_metadata(headers=dict(KEYED)), module.__name__, tally)


def _triton_type(array: np.ndarray[Any, Any]) -> str:
    return {"int64": "INT64", "float32": "FP32"}[array.dtype.name]


def _refused(call: Any, what: str, tally: Tally) -> None:
    try:
        call()
    except Exception as error:  # noqa: BLE001  (each client has its own)
        tally.check("Traceback" not in str(error), what, verdict="refused")
    else:
        tally.add("wrong", f"{what}: let in")


def openai_client(server: Running, tally: Tally) -> None:
    """``openai`` over HTTPS: the same greedy answer each time; refused without the key or trust."""
    import openai

    def client(key: str, *, trusts: bool = True) -> openai.OpenAI:
        web = httpx.Client(verify=server.context() if trusts else True, timeout=None)
        return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, http_client=web)

    def ask(asking: openai.OpenAI) -> str:
        return asking.completions.create(model="tiny", prompt="ab", max_tokens=8, temperature=0).choices[0].text

    with client(KEY) as known, client(KEY.upper()) as unknown, client(KEY, trusts=False) as stranger:
        first = ask(known)
        for _ in range(10):
            tally.check(ask(known) == first, "openai: another answer")
        for asking in (unknown, stranger):
            _refused(lambda asking=asking: ask(asking), "openai", tally)


def web_pages(server: Running, tally: Tally) -> None:
    """Send requests that a page can make a browser send: none passes, even with the key."""
    paths = {
        "orca": ["/v1/completions", "/v1/chat/completions", "/tokenize"],
        "batchmaker": ["/v2/models/tiny/infer", "/v2/repository/models/tiny/unload", "/v2/repository/index"],
    }
    origins = ["https://evil.example", "null", "https://127.0.0.1.evil.example", "http://localhost:1", "file://"]
    types = [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/json"]
    with httpx.Client(base_url=server.url, verify=server.context(), headers=dict(KEYED)) as client:
        for path in paths.get(server.kind, paths["batchmaker"]):
            for origin in origins:
                for content_type in types:
                    headers = {"origin": origin} | ({} if content_type is None else {"content-type": content_type})
                    answer = client.post(path, content=b"{}", headers=dict(headers))
                    tally.check(answer.status_code == 403, f"{path} from {origin} as {content_type}", verdict="refused")
            for host in ("evil.example", "127.0.0.1.evil.example:443", "localhost.evil.example"):
                for method in ("GET", "POST"):
                    answer = client.request(method, path, headers={"host": host})
                    tally.check(answer.status_code == 403, f"{method} {path} as {host}", verdict="refused")
        headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
        answer = client.options("/v1/completions", headers=dict(headers))
        is_closed = "access-control-allow-origin" not in answer.headers
        tally.check(is_closed, "a preflight was allowed", verdict="refused")


def stalled_connections(server: Running, tally: Tally, *, number: int) -> None:
    """Connections that stop at each point where one can: all are closed, and others are served meanwhile.

    The server's own times pass (``--header-timeout-s``, ``--body-timeout-s``); nothing here measures them.
    """
    starts = [
        b"",
        b"GET /health/live HT",
        b"POST /v2/models/tiny/infer HTTP/1.1\r\nhost: localhost\r\nx: ",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\nx-api-key: %s\r\n\r\n{"
        % KEY.encode(),
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab",
        None,  # in the middle of the handshake
    ]
    context = server.context()
    with ExitStack() as stack:
        stalled = []
        for index in range(number):
            start = starts[index % len(starts)]
            sock = stack.enter_context(socket.create_connection(server.address))
            if start is None:
                sock.sendall(b"\x16\x03\x01")
            else:
                sock = stack.enter_context(context.wrap_socket(sock, server_hostname="localhost"))
                sock.sendall(start)
            stalled.append((sock, start))
        alive = httpx.get(f"{server.url}/health/live", verify=context, timeout=None)
        tally.check(alive.status_code == 200, "others are not served beside stalled connections")
        for sock, start in stalled:
            sock.settimeout(120)
            tally.check(_is_closed(sock), f"open after two minutes: {start!r}", verdict="refused")


def _is_closed(sock: socket.socket) -> bool:
    try:
        while sock.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True
