from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlsys_serving.http.lifecycle import Lifecycle, Readiness

Check = Callable[[httpx.Response, int, str], dict[str, Any]]
WAIT_S = 1200  # ends a hang; nothing is decided by it

SCRIPT = """
import asyncio, contextlib, os, pathlib, sys, time
from fastapi.responses import StreamingResponse
from mlsys_serving.http import HttpConfig, Router, create_app, serve

router = Router()
folder = pathlib.Path(sys.argv[1])

async def released():
    while not (folder / "release").exists():
        await asyncio.sleep(0.01)

@router.get("/slow")
async def slow():
    await released()
    return "finished"

@router.get("/stream")
async def stream():
    async def chunks():
        yield "data: first\\n\\n"
        await released()
        yield "data: last\\n\\n"
    return StreamingResponse(chunks(), media_type="text/event-stream")

@router.get("/pid")
async def pid():
    return os.getpid()

@router.get("/stuck")
async def stuck():
    (folder / "stuck").touch()
    while True:  # blocks the event loop
        time.sleep(0.05)

@contextlib.asynccontextmanager
async def lifespan(app):
    (folder / "lifespan-entered").touch()
    try:
        if sys.argv[3] == "hang":
            await asyncio.Event().wait()
        yield {}
    finally:
        (folder / "lifespan-left").touch()

app = create_app(
    HttpConfig(drain_timeout_s=float(sys.argv[2])),
    routers=[router],
    lifespan=lifespan,
    on_drain=[(folder / "drain-hook").touch],
)
sys.exit(serve(app, port=0, on_ready=lambda address: print(address.url, flush=True)))
"""


class Process:
    """The script above, running."""

    def __init__(self, folder: Path, drain_timeout_s: float, lifespan: str) -> None:
        self.folder = folder
        script = folder / "script.py"
        script.write_text(SCRIPT)
        self.popen = subprocess.Popen(
            [sys.executable, str(script), str(folder), str(drain_timeout_s), lifespan],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if lifespan == "hang":
            return
        assert self.popen.stdout is not None
        self.url = self.popen.stdout.readline().strip()
        assert self.url.startswith("http://127.0.0.1:"), self.popen.communicate()[1]

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            time.sleep(0.01)

    def wait_until_draining(self) -> httpx.Response:
        answers: list[httpx.Response] = []

        def is_draining() -> bool:
            answers.append(httpx.get(f"{self.url}/health/ready"))
            return answers[-1].status_code == 503

        self.wait_until(is_draining)
        return answers[-1]

    def release(self) -> None:
        (self.folder / "release").touch()

    def exit_code(self) -> int:
        return self.popen.wait(WAIT_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def run(*, drain_timeout_s: float, lifespan: str = "") -> Process:
        processes.append(Process(tmp_path, drain_timeout_s, lifespan))
        return processes[-1]

    yield run
    for process in processes:
        process.popen.kill()
        process.popen.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_running_requests_and_streams_finish(
    number: signal.Signals, start: Any, tmp_path: Path, check_error: Check
) -> None:
    process = start(drain_timeout_s=600)
    with httpx.Client(base_url=process.url, timeout=WAIT_S) as client, client.stream("GET", "/stream") as stream:
        lines = stream.iter_lines()
        assert next(lines) == "data: first"
        with socket.create_connection(("127.0.0.1", httpx.URL(process.url).port), timeout=WAIT_S) as slow:
            slow.sendall(b"GET /slow HTTP/1.1\r\nhost: localhost\r\n\r\n")
            process.wait_until(lambda: "in_flight 3.0" in client.get("/metrics").text)  # these two and the question

            process.send(number)
            assert process.wait_until_draining().json()["status"] == "draining"
            assert client.get("/health/live").status_code == 200
            refused = client.get("/pid")
            check_error(refused, 503, "shutting_down")
            assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
            assert (tmp_path / "drain-hook").exists()
            assert process.popen.poll() is None

            process.release()
            assert [line for line in lines if line] == ["data: last"]
            assert slow.recv(4096).startswith(b"HTTP/1.1 200 OK")
    assert process.exit_code() == 0
    assert (tmp_path / "lifespan-left").exists()
    stderr = process.popen.communicate()[1]
    assert '"clean": true' in stderr
    assert "Traceback" not in stderr


def test_an_idle_server_with_an_open_connection_exits_at_once(start: Any) -> None:
    process = start(drain_timeout_s=600)
    with httpx.Client(base_url=process.url) as client:
        assert client.get("/pid").json() == process.popen.pid
        process.send(signal.SIGTERM)
        assert process.exit_code() == 0


def test_requests_that_outlive_the_drain_are_cut_with_an_error(start: Any, tmp_path: Path, check_error: Check) -> None:
    process = start(drain_timeout_s=0.2)
    results: dict[str, httpx.Response] = {}
    slow = threading.Thread(target=lambda: results.update(slow=httpx.get(f"{process.url}/slow", timeout=WAIT_S)))
    slow.start()
    with httpx.stream("GET", f"{process.url}/stream", timeout=WAIT_S) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "data: first"
        process.wait_until(lambda: "in_flight 3.0" in httpx.get(f"{process.url}/metrics").text)
        process.send(signal.SIGTERM)
        [last] = [line for line in lines if line]
    assert last.startswith('data: {"error":{"type":"server_error","code":"shutting_down"')
    slow.join()
    check_error(results["slow"], 503, "shutting_down")
    assert process.exit_code() == 1
    assert (tmp_path / "lifespan-left").exists()


def test_a_second_signal_exits_at_once(start: Any, tmp_path: Path) -> None:
    process = start(drain_timeout_s=600)
    with httpx.stream("GET", f"{process.url}/stream", timeout=WAIT_S) as stream:
        lines = stream.iter_lines()  # kept: httpx closes the connection with its iterator
        assert next(lines) == "data: first"
        process.send(signal.SIGTERM)
        process.wait_until_draining()
        process.send(signal.SIGTERM)
        assert process.exit_code() == 128 + signal.SIGTERM
    assert (tmp_path / "lifespan-left").exists()  # it left by itself, not by the last resort


def test_a_second_signal_ends_even_a_blocked_event_loop(start: Any, tmp_path: Path) -> None:
    process = start(drain_timeout_s=600)
    with socket.create_connection(("127.0.0.1", httpx.URL(process.url).port)) as sock:
        sock.sendall(b"GET /stuck HTTP/1.1\r\nhost: localhost\r\n\r\n")
        process.wait_until((tmp_path / "stuck").exists)
        process.send(signal.SIGINT)
        process.send(signal.SIGTERM)  # another number: two of the same may be merged into one
        assert process.exit_code() in (128 + signal.SIGTERM, 128 + signal.SIGINT)


def test_a_signal_while_the_app_starts_ends_it_and_its_lifespan_cleans_up(start: Any, tmp_path: Path) -> None:
    process = start(drain_timeout_s=600, lifespan="hang")
    process.wait_until((tmp_path / "lifespan-entered").exists)
    process.send(signal.SIGTERM)
    assert process.exit_code() == 128 + signal.SIGTERM
    assert (tmp_path / "lifespan-left").exists()
    said = process.popen.stderr.read()
    assert "stopped while starting" in said
    assert "Traceback" not in said


class FakeRequest:
    def __init__(self) -> None:
        self.stopped_with: list[Any] = []

    def stop(self, error: Any) -> None:
        self.stopped_with.append(error)


async def test_drain_waits_for_the_last_request_then_cuts() -> None:
    order: list[str] = []

    async def slow_hook() -> None:
        await asyncio.sleep(0)
        order.append("async hook")

    def broken_hook() -> None:
        raise KeyError("hook")

    failed: list[Exception] = []
    hooks = [broken_hook, lambda: order.append("hook"), slow_hook]
    lifecycle = Lifecycle(Readiness(), on_drain=hooks, on_hook_error=failed.append)
    first, second = FakeRequest(), FakeRequest()
    with lifecycle.running(first):
        with lifecycle.running(second):
            draining = asyncio.create_task(lifecycle.drain(600))
            await asyncio.sleep(0.01)
            assert lifecycle.is_draining
            assert lifecycle.num_running == 2
        assert not draining.done()
    assert await draining
    assert order == ["hook", "async hook"]
    assert [repr(error) for error in failed] == ["KeyError('hook')"]
    assert first.stopped_with == []

    with lifecycle.running(first):
        assert not await lifecycle.drain(0, cut_grace_s=0)
    [error] = first.stopped_with
    assert (error.http_status, error.error_code) == (503, "shutting_down")
    assert order == ["hook", "async hook"]  # once


async def test_a_cut_request_gets_a_moment_to_clean_up() -> None:
    lifecycle, stopped = Lifecycle(Readiness()), asyncio.Event()

    class Request:
        def stop(self, error: Any) -> None:
            stopped.set()

    async def run() -> None:
        with lifecycle.running(Request()):
            await stopped.wait()
            await asyncio.sleep(0.02)

    running = asyncio.create_task(run())
    await asyncio.sleep(0)
    assert not await lifecycle.drain(0, cut_grace_s=600)
    assert lifecycle.num_running == 0
    await running
