from __future__ import annotations

import gc
import io
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_serving.http import BackgroundServer, HttpConfig, Router, ServerAddress, create_app, runtime_of, serve
from mlsys_serving.http.lifecycle import Readiness
from mlsys_serving.http.record import make_logger

Check = Callable[[httpx.Response, int, str], dict[str, Any]]
WAIT_S = 1200  # ends a hang; nothing is decided by it


def _app(**options: Any) -> FastAPI:
    return create_app(HttpConfig(drain_timeout_s=0), **options)


def test_port_zero_takes_a_free_port_and_the_server_can_be_asked() -> None:
    with BackgroundServer(_app()) as server:
        assert server.address.port > 0
        assert server.url == f"http://127.0.0.1:{server.address.port}"
        assert httpx.get(f"{server.url}/health/ready").json()["status"] == "ready"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health/live")
    server.stop()  # again: no harm
    with pytest.raises(ServingError, match="make a new one"):
        server.start()


def test_two_servers_at_a_time_do_not_mix() -> None:
    with BackgroundServer(_app()) as first, BackgroundServer(_app()) as second:
        httpx.get(f"{first.url}/health/live")
        assert "/health/live" in httpx.get(f"{first.url}/metrics").text
        assert "/health/live" not in httpx.get(f"{second.url}/metrics").text


def test_an_address_before_the_start_is_an_error() -> None:
    with pytest.raises(ServingError, match="not been started"):
        _ = BackgroundServer(_app()).url


@pytest.mark.parametrize(
    "run", [lambda app, port: BackgroundServer(app, port=port).start(), lambda app, port: serve(app, port=port)]
)
def test_a_port_in_use_says_which_option_to_change(run: Callable[[FastAPI, int], Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServingError, match=rf"port {port} on 127.0.0.1 is in use .*--port"):
            run(_app(), port)


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [
        ("127.0.0.1", 70000, "0 .* to 65535"),
        ("127.0.0.1", -1, "0 .* to 65535"),
        ("203.0.113.1", 0, "not an address of this machine"),
        ("no such host", 0, "cannot be resolved"),
        ("a" * 300, 0, "cannot be resolved"),
    ],
)
def test_a_bad_address_is_refused(host: str, port: int, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        BackgroundServer(_app(), host, port).start()


def test_ipv6_addresses_are_written_in_brackets() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with BackgroundServer(_app(), "::1") as server:
        assert server.url.startswith("http://[::1]:")
        assert httpx.get(f"{server.url}/health/live").status_code == 200


@pytest.mark.parametrize(("host", "url"), [("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80")])
def test_the_url_of_all_interfaces_works_here(host: str, url: str) -> None:
    assert ServerAddress(host, 80).url == url


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (KeyError("weights"), ServingError, "failed to start: 'weights'"),
        (InvalidInputError("no model there"), InvalidInputError, "no model there"),
    ],
)
def test_an_app_that_fails_to_start_raises_its_reason(
    raised: Exception, expected: type[Exception], message: str
) -> None:
    lines = io.StringIO()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        raise raised
        yield

    for run in (lambda app: BackgroundServer(app).start(), lambda app: serve(app, port=0)):
        with pytest.raises(expected, match=message):
            run(_app(lifespan=lifespan, logger=make_logger("json", stream=lines)))
    is_defect = expected is ServingError
    assert ("Traceback" in lines.getvalue()) is is_defect  # a refusal is one line, which who started it prints


def test_serve_needs_the_main_thread_and_a_made_app() -> None:
    errors: list[Exception] = []

    def run() -> None:
        try:
            serve(_app(), port=0)
        except InvalidInputError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "BackgroundServer" in str(errors[0])
    with pytest.raises(InvalidInputError, match="create_app"):
        serve(FastAPI(), port=0)


def test_a_server_of_its_own_process_collects_seldom_and_never_what_the_start_has_made() -> None:
    before = gc.get_threshold()
    seen: list[tuple[int, int]] = []

    def ready(_: ServerAddress) -> None:
        seen.append((gc.get_freeze_count(), gc.get_threshold()[0]))
        signal.raise_signal(signal.SIGTERM)

    assert serve(_app(), port=0, on_ready=ready) == 0
    [(num_frozen, threshold)] = seen
    assert num_frozen > 10_000
    assert threshold > 10 * 256 * 10  # many clients' requests in flight are no reason to look
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, before)


def test_the_lifespan_reaches_requests_and_stop_runs_its_end() -> None:
    ended: list[bool] = []
    router = Router()

    @router.get("/engine")
    async def engine(request: Request) -> str:
        return str(request.state.engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        yield {"engine": "orca"}
        ended.append(True)

    with BackgroundServer(_app(routers=[router], lifespan=lifespan)) as server:
        assert httpx.get(f"{server.url}/engine").json() == "orca"
        assert ended == []
    assert ended == [True]


def test_stop_lets_running_requests_finish() -> None:
    router, entered, leave = Router(), threading.Event(), threading.Event()

    @router.get("/slow")
    def slow() -> str:
        entered.set()
        leave.wait(WAIT_S)
        return "finished"

    results: list[httpx.Response] = []
    server = BackgroundServer(create_app(HttpConfig(), routers=[router]), drain_timeout_s=600).start()
    request = threading.Thread(target=lambda: results.append(httpx.get(f"{server.url}/slow", timeout=WAIT_S)))
    request.start()
    assert entered.wait(WAIT_S)
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    while httpx.get(f"{server.url}/health/ready").status_code != 503:
        pass
    leave.set()
    request.join()
    stopping.join()
    assert results[0].json() == "finished"


@pytest.fixture(autouse=True)
def _uvicorn_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have other tests' settings of the standard library's log end here."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)
    logging.getLogger("uvicorn.error").manager._clear_cache()  # type: ignore[attr-defined]


def test_warnings_of_the_server_library_come_out_of_the_apps_log(
    make_app: Any, serve: Any, dial: Any, log: Any
) -> None:
    server = serve(make_app())
    with dial(server) as sock:
        sock.sendall(b"this is no HTTP\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 400 ")
    server.stop()
    [event] = log.events("server")
    assert (event["source"], event["message"], event["level"]) == (
        "uvicorn",
        "Invalid HTTP request received.",
        "warning",
    )


def test_runtime_is_what_the_app_was_made_with() -> None:
    readiness = Readiness()
    config = HttpConfig(title="x")
    runtime = runtime_of(create_app(config, readiness=readiness))
    assert runtime.config is config
    assert runtime.readiness is readiness
