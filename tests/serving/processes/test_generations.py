"""Generations with real processes: one follows the other, none is left behind, and no connection is lost between."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from mlsys_serving.processes import can_supervise

from tests.certificates import make_certificates
from tests.processes import await_ends, by_age, end, until

pytestmark = pytest.mark.skipif(can_supervise() is not None, reason=str(can_supervise()))

# A front in a process of its own below each generation, as servers have it. The settings are the generation's answer.
SCRIPT = """
import asyncio, os, pathlib, signal, sys, time
from fastapi.responses import StreamingResponse
from mlsys_core.errors import InvalidInputError
from mlsys_serving.http import ConnectionLimits, HttpConfig, Router, create_app, serve
from mlsys_serving.http.port import BoundPort
from mlsys_serving.http.tls import TlsConfig
from mlsys_serving.processes import Boxes, Generations, RestartBudget, Supervisor

files = [pathlib.Path(file) for file in sys.argv[2:]]
http = HttpConfig(tls=TlsConfig(certificate=files[0], key=files[1]) if files else None, log_level="warning",
                  connections=ConnectionLimits(header_timeout_s=3600.0, keep_alive_timeout_s=3600.0))
bound = BoundPort("127.0.0.1", 0, config=http, answers=False)

def live(settings, link):
    if settings.get("broken"):
        raise InvalidInputError("it is broken")
    if settings.get("dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    while not pathlib.Path(settings.get("gate", "/")).exists():
        time.sleep(0.01)
    router = Router()

    @router.get("/pid")
    async def pid():
        return {"pid": os.getpid(), "answer": settings["answer"]}

    @router.get("/stream")
    async def stream(number: int = 40, gate: str = "/"):
        async def chunks():
            for index in range(number):
                yield f"{settings['answer']}{index}\\n"
                await asyncio.sleep(0.01)
            while not pathlib.Path(gate).exists():
                await asyncio.sleep(0.01)
        return StreamingResponse(chunks(), media_type="text/plain")

    @router.post("/echo")
    async def echo(body: dict):
        return body

    @router.post("/reload")
    async def reload(changes: dict):
        outcome = await link.reload(changes)
        return {"number": outcome.number}

    @router.post("/keep")
    async def keep(changes: dict):
        link.keep(changes)
        return {}

    @router.get("/status")
    async def status():
        status = link.status
        return {"serving": status.serving, "loading": status.loading, "retiring": dict(status.retiring),
                "settings": dict(status.settings), "error": status.outcome.error if status.outcome else None}

    @router.post("/exit")
    async def leave(code: int):
        os._exit(code)

    def front(_):
        return serve(create_app(http, routers=[router]), bound=bound, generation=link,
                     on_ready=lambda address: print(f'{{"url": "{address.url}", "pid": {os.getpid()}}}', flush=True))

    return Supervisor(front, lambda number, end: end.recv(1), num_workers=1, boxes=Boxes(4)).run()

sys.exit(Generations(live, {"answer": "a"} | eval(sys.argv[1]),
                     budget=RestartBudget(max_deaths=3, window_s=3600.0)).run())
"""


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str

    def next(self) -> dict[str, Any]:
        """Return the line that the next front prints when it is ready."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def generations(self) -> list[psutil.Process]:
        return sorted(psutil.Process(self.process.pid).children(), key=by_age)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=None, verify=False)

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.url}{path}", timeout=None, verify=False).json()

    def until(self, **state: Any) -> None:
        until(lambda: {name: value for name, value in self.get("/status").items() if name in state} == state)


@contextmanager
def serving(settings: str = "{}", *arguments: str) -> Iterator[Server]:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), settings, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server = Server(process, json.loads(process.stdout.readline())["url"])
        children = psutil.Process(process.pid).children(recursive=True)
        try:
            # It takes requests before the one above it knows.
            until(lambda: server.get("/status")["serving"] is not None)
            yield server
            if process.poll() is None:
                children = psutil.Process(process.pid).children(recursive=True)
        finally:
            end(process)
    await_ends(children)  # nobody is left


class Stream:
    """A thread that reads a stream to its end, which waits for a file; it has begun to arrive once this is made."""

    def __init__(self, server: Server, number: int = 40, gate: Path = Path("/")) -> None:
        self.lines: list[str] = []
        self.broken: httpx.HTTPError | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(f"{server.url}/stream?number={number}&gate={gate}",))
        self._thread.start()
        self._begun.wait()

    def _read(self, url: str) -> None:
        try:
            with httpx.stream("GET", url, timeout=None) as response:
                for line in response.iter_lines():
                    self.lines.append(line)
                    self._begun.set()
        except httpx.HTTPError as error:
            self.broken = error
        finally:
            self._begun.set()

    def join(self) -> Stream:
        """Wait for its end."""
        self._thread.join()
        return self


class Clients:
    """Threads that ask again and again on kept connections, until told to stop; a failure is raised at the end."""

    def __init__(self, server: Server, number: int) -> None:
        self._server, self._stop = server, threading.Event()
        self.answers: list[set[str]] = [set() for _ in range(number)]
        self._failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(number)]

    def _run(self, index: int) -> None:
        try:
            with httpx.Client(timeout=None, verify=False) as client:
                while not self._stop.is_set():
                    if index % 2:
                        self.answers[index].add(
                            client.get(f"{self._server.url}/pid").raise_for_status().json()["answer"]
                        )
                    else:
                        body = {"text": "x" * 200_000}
                        assert client.post(f"{self._server.url}/echo", json=body).json() == body
        except BaseException as error:  # noqa: BLE001 - raised in the test
            self._failures.append(error)

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert not self._failures, self._failures


def test_no_request_and_no_connection_is_lost_between_generations():
    with serving() as server, httpx.Client(timeout=None) as kept, Clients(server, 4) as clients:
        assert kept.get(f"{server.url}/pid").json()["answer"] == "a"
        streams: list[Stream] = []
        for number in range(5):
            letter = "bcdef"[number]
            streams += [Stream(server) for _ in range(2)]
            assert server.post("/reload", answer=letter).json() == {"number": number + 2}
            server.next()
            server.until(retiring={}, serving=number + 2)
            # The same connection, which nobody has closed, is served by the next generation now.
            assert kept.get(f"{server.url}/pid").json()["answer"] == letter
            until(lambda asked=letter: asked in clients.answers[1] | clients.answers[3])
        for number, stream in enumerate(streams):  # each by the generation that it began with, whole
            assert stream.join().lines == [f"{'abcde'[number // 2]}{index}" for index in range(40)]
        (pool,) = [kept._transport._pool]  # type: ignore[attr-defined]
        assert len(pool.connections) == 1
        assert "Request Count: 6" in repr(pool.connections[0])


def test_more_connections_than_their_queue_holds_go_over():
    number = 700
    with serving() as server:
        port = int(server.url.rpartition(":")[2])
        connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(number)]
        for index, connection in enumerate(connections):
            if index % 2:  # the others have not asked anything yet
                assert ask(connection) == "a"
        assert server.post("/reload", answer="b").status_code == 200
        server.until(retiring={}, serving=2)
        for connection in connections:
            assert ask(connection) == "b"
            connection.close()


def ask(connection: socket.socket) -> str:
    """Ask for the answer on a kept connection."""
    connection.sendall(b"GET /pid HTTP/1.1\r\nHost: localhost\r\n\r\n")
    data = b""
    while b"\r\n\r\n" not in data or not data.endswith(b"}"):
        piece = connection.recv(4096)
        assert piece, "the connection was closed"
        data += piece
    return str(json.loads(data.partition(b"\r\n\r\n")[2])["answer"])


def test_connections_with_tls_are_told_to_come_again(certificate: list[str]):
    with serving("{}", *certificate) as server, httpx.Client(timeout=None, verify=False) as kept:
        assert kept.get(f"{server.url}/pid").json()["answer"] == "a"
        with Clients(server, 2):
            done = threading.Thread(target=server.post, args=("/reload",), kwargs={"answer": "b"})
            done.start()
            server.next()
            answers = [kept.get(f"{server.url}/pid")]
            while answers[-1].json()["answer"] == "a":
                answers.append(kept.get(f"{server.url}/pid"))
            assert [answer.headers.get("connection") for answer in answers[-2:]] == ["close", None]
            done.join()
        kept.close()
        server.until(retiring={}, serving=2)


def test_one_that_cannot_start_changes_nothing_and_the_one_who_asked_hears_why():
    with serving() as server:
        answer = server.post("/reload", broken=True)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "it is broken"
        answer = server.post("/reload", dies=True)
        assert answer.status_code == 500
        assert "SIGKILL" in answer.json()["error"]["message"]
        assert server.get("/pid")["answer"] == "a"
        assert server.post("/reload", answer="b").json() == {"number": 4}
        until(lambda: len(server.generations()) <= 2)  # the two that failed may still be ending


def test_one_reload_at_a_time(tmp_path: Path):
    with serving() as server:
        stream, gate = Stream(server, gate=tmp_path / "stream"), tmp_path / "reload"
        asked = threading.Thread(target=server.post, args=("/reload",), kwargs={"answer": "b", "gate": str(gate)})
        asked.start()
        server.until(loading=2)
        answer = server.post("/reload", answer="c")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "reload_under_way")
        gate.touch()
        asked.join()
        server.until(serving=2, retiring={"1": 1})
        answer = server.post("/reload", answer="c")
        assert answer.status_code == 409
        assert "1 requests" in answer.json()["error"]["message"]
        (tmp_path / "stream").touch()
        stream.join()
        server.until(retiring={})
        assert server.post("/reload", answer="c").status_code == 200


def test_sighup_reloads_with_the_settings_that_are_kept():
    with serving() as server:
        server.post("/keep", answer="kept")
        server.until(settings={"answer": "kept"})
        server.process.send_signal(signal.SIGHUP)
        server.next()
        server.until(serving=2, retiring={})
        assert server.get("/pid")["answer"] == "kept"


def test_when_its_terminal_closes_it_ends():
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), "{}"]
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        for number in range(3):
            os.dup2(theirs, number)
        os.execv(command[0], command)
    os.close(theirs)
    said = b""
    while b"\n" not in said:
        said += os.read(ours, 4096)
    children = psutil.Process(pid).children(recursive=True)
    os.close(ours)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    await_ends(children)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_generations_which_finish_what_runs(number: int):
    with serving() as server:
        stream = Stream(server)
        assert server.post("/reload", answer="b").status_code == 200
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(number)
        assert len(stream.join().lines) == 40
        assert server.process.wait() == 0
        await_ends(children)


def test_exit_codes_pass_through_and_the_first_ones_failure_is_raised():
    with serving() as server:
        with pytest.raises(httpx.HTTPError):
            server.post("/exit?code=7")
        assert server.process.wait() == 7
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), "{'broken': True}"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "ServingError: it is broken" in ran.stderr
    ran = subprocess.run([*command[:-1], "{'dies': True}"], capture_output=True, text=True, check=False)
    assert ran.returncode == 137


def test_nobody_outlives_a_master_that_is_killed():
    with serving() as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert {child.name() for child in children} == {"mlsys-generatio", "mlsys-front", "mlsys-worker"}
        server.process.kill()
        server.process.wait()
        await_ends(children)


def test_a_generation_that_is_killed_follows_itself_until_that_does_not_help():
    with serving() as server:
        server.post("/keep", answer="kept")
        server.until(settings={"answer": "kept"})
        for _ in range(2):
            server.generations()[0].kill()
            server.next()
            assert server.get("/pid")["answer"] == "kept"
        server.generations()[0].kill()
        assert server.process.wait() == 71


def test_a_front_that_is_killed_while_it_retires_retires_again():
    with serving() as server:
        stream = Stream(server, gate=Path("/never"))
        assert server.post("/reload", answer="b").status_code == 200
        server.next()
        server.until(retiring={"1": 1})
        old = server.generations()[0]
        (front,) = [child for child in old.children() if child.name() == "mlsys-front"]
        os.kill(front.pid, signal.SIGKILL)
        assert stream.join().broken
        server.next()  # the front anew, which the master tells to retire
        server.until(retiring={}, serving=2)
        assert {server.get("/pid")["answer"] for _ in range(10)} == {"b"}


@pytest.fixture
def certificate(tmp_path: Path) -> list[str]:
    made = make_certificates(tmp_path)
    return [str(made.server), str(made.server_key)]
