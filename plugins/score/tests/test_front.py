"""The page and its routes: what a browser gets, with and without a key, and how a drain ends it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import threading
import time
from typing import Any

import httpx
import pytest
from mlsys_core.plugins import Registry
from mlsys_core.plugins.specs import ServerExtensionSpec
from mlsys_score.board import Board
from mlsys_score.extension import ScoreOptions
from mlsys_score.page import live_page, recording_page
from mlsys_serving.extensions import Extensions, Served
from mlsys_serving.http import BackgroundServer, HttpConfig, create_app
from mlsys_serving.watch import Kind, Square, Watch
from mlsys_serving.watch_log import EventLog


class Engine:
    """A source that hands out the board that it is watched by."""

    def __init__(self) -> None:
        self.log, self.board = EventLog(), None

    def begin(self, board: Board) -> None:
        self.board = board

    def find(self) -> None:
        pass


def make_server(engine: Engine, *, no_ui: bool = False, **config: Any) -> BackgroundServer:
    registry = Registry()
    score = ServerExtensionSpec(
        name="score", help="x", factory="mlsys_score.extension:extend", options="mlsys_score.extension:ScoreOptions"
    )
    registry.add(score, "mlsys-score")
    extensions = Extensions.of("windtunnel", registry, score=ScoreOptions(no_ui=no_ui))
    watch = Watch(unit="batch", facts=lambda: {"models": ["m"]}, sources=lambda: [engine])
    app = create_app(HttpConfig(**config), served=Served(system="windtunnel", extensions=extensions, watch=watch))
    return BackgroundServer(app, drain_timeout_s=240)


def next_event(lines: object) -> tuple[str, dict]:
    name = data = ""
    for line in lines:  # type: ignore[attr-defined]
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            data = line[6:]
        elif not line and data:
            return name, json.loads(data)
    raise AssertionError("the stream has ended")


def test_the_page_is_small_and_runs_its_own_script_alone():
    page = live_page()
    assert len(page.gzipped) <= 150_000, "the issue's bound"
    assert gzip.decompress(page.gzipped) == page.html
    text = page.html.decode()
    [script] = re.findall(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    [style] = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    for part, kind in ((script, "script"), (style, "style")):
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in page.policy
    assert "default-src 'none'" in page.policy
    assert "unsafe" not in page.policy
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text), "nothing is loaded from elsewhere"
    assert "innerHTML" not in script
    assert "insertAdjacentHTML" not in script
    assert "eval(" not in script
    assert not re.findall(r"^(?:import|export) ", script, re.MULTILINE)
    names = re.findall(r"^(?:async )?(?:function\*?|const|let|class) (\w+)", script, re.MULTILINE)
    assert len(names) == len(set(names)), "the modules share one scope"


def test_a_recording_cannot_end_its_element():
    page = recording_page({"columns": ["</script><script>alert(1)</script>"]}, title="<b>")
    assert "</script><script>alert" not in page
    assert "<title>&lt;b&gt;</title>" in page


def test_what_a_browser_gets():
    with make_server(Engine()) as server:
        answer = httpx.get(server.url + "/")
        assert answer.status_code == 200
        assert answer.headers["content-encoding"] == "gzip"
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.content == live_page().html
        assert answer.headers["content-security-policy"] == live_page().policy
        plain = httpx.get(server.url + "/", headers={"accept-encoding": "identity"})
        assert plain.content == live_page().html
        assert "content-encoding" not in plain.headers
        again = httpx.get(server.url + "/", headers={"if-none-match": answer.headers["etag"]})
        assert again.status_code == 304
        assert "/ui/score/events" not in httpx.get(server.url + "/openapi.json").text


def test_the_page_is_open_and_its_events_need_the_key():
    with make_server(Engine(), api_keys=frozenset({"secret"})) as server:
        assert httpx.get(server.url + "/").status_code == 200
        for path in ("/ui/score/events", "/ui/score/recording"):
            assert httpx.get(server.url + path).status_code == 401
        key = {"authorization": "Bearer secret"}
        assert httpx.get(server.url + "/ui/score/recording", headers=key).json()["system"] == "windtunnel"


@pytest.mark.parametrize("keys", [frozenset(), frozenset({"secret"})])
def test_without_ui_there_is_no_page(keys: frozenset[str]):
    with make_server(Engine(), no_ui=True, api_keys=keys) as server:
        expected = 401 if keys else 404
        assert httpx.get(server.url + "/").status_code == expected
        assert httpx.get(server.url + "/ui/score/recording").status_code == expected


def test_events_begin_with_a_snapshot_and_go_on_with_what_is_new():
    engine = Engine()
    with make_server(engine) as server, httpx.stream("GET", server.url + "/ui/score/events", timeout=None) as stream:
        lines = stream.iter_lines()
        name, snapshot = next_event(lines)
        assert name == "snapshot"
        assert snapshot["facts"] == {"models": ["m"], "has_panels": False}
        assert snapshot["columns"] == []
        board = engine.board
        assert board is not None
        assert board.num_viewers == 1
        row = board.row("a")
        now = time.perf_counter()
        board.add(now, now + 0.25, [Square(row.number, Kind.DECODE, 1)], split_ms={"batch": 250.0})
        name, delta = next_event(lines)
        assert name == "delta"
        assert [each["row"] for each in delta["rows"]] == [1]
        assert [(column["n"], column["ms"]) for column in delta["columns"]] == [(1, 250.0)]


def test_a_drain_does_not_wait_for_pages():
    engine = Engine()
    server = make_server(engine).start()
    opened = threading.Event()
    ends: list[bool] = []

    def watch() -> None:
        with httpx.stream("GET", server.url + "/ui/score/events", timeout=None) as stream:
            opened.set()
            ends.append(stream.read().endswith(b"\n\n"))

    thread = threading.Thread(target=watch)
    thread.start()
    assert opened.wait(240)
    server.stop()
    thread.join(240)
    assert ends == [True], "the stream ended whole, and was not cut"
    assert engine.board is not None
    assert engine.board.is_closed
