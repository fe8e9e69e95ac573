"""The page and its routes: what a browser gets, with and without a key, and how a drain ends it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import threading
import time

import httpx
import pytest
from mlsys_serving.http import BackgroundServer, HttpConfig, create_app
from mlsys_serving.score import Board, Kind, Score, Square
from mlsys_serving.score.page import live_page, recording_page


def make_board() -> Board:
    return Board(system="windtunnel", unit="batch", facts=lambda: {"models": ["m"]})


def make_server(board: Board, **config: object) -> BackgroundServer:
    app = create_app(HttpConfig(has_ui=True, **config), score=Score(board))  # type: ignore[arg-type]
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
    with make_server(make_board()) as server:
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
    with make_server(make_board(), api_keys=frozenset({"secret"})) as server:
        assert httpx.get(server.url + "/").status_code == 200
        for path in ("/ui/score/events", "/ui/score/recording"):
            assert httpx.get(server.url + path).status_code == 401
        assert httpx.post(server.url + "/ui/score/replay?policy=orca", json={}).status_code == 401
        key = {"authorization": "Bearer secret"}
        assert httpx.get(server.url + "/ui/score/recording", headers=key).json()["system"] == "windtunnel"


@pytest.mark.parametrize("config", [HttpConfig(), HttpConfig(api_keys=frozenset({"secret"}))])
def test_without_ui_there_is_no_page(config: HttpConfig):
    with BackgroundServer(create_app(config, score=Score(make_board()))) as server:
        expected = 401 if config.api_keys else 404
        assert httpx.get(server.url + "/").status_code == expected
        assert httpx.get(server.url + "/ui/score/recording").status_code == expected


def test_events_begin_with_a_snapshot_and_go_on_with_what_is_new():
    board = make_board()
    with make_server(board) as server, httpx.stream("GET", server.url + "/ui/score/events", timeout=None) as stream:
        lines = stream.iter_lines()
        name, snapshot = next_event(lines)
        assert name == "snapshot"
        assert snapshot["facts"] == {"models": ["m"]}
        assert snapshot["columns"] == []
        assert board.num_viewers == 1
        row = board.row("a")
        now = time.perf_counter()
        board.add(now, now + 0.25, [Square(row.number, Kind.DECODE, 1)], split_ms={"batch": 250.0})
        name, delta = next_event(lines)
        assert name == "delta"
        assert [each["row"] for each in delta["rows"]] == [1]
        assert [(column["n"], column["ms"]) for column in delta["columns"]] == [(1, 250.0)]


def test_a_drain_does_not_wait_for_pages():
    board = make_board()
    server = make_server(board).start()
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
    assert board.is_closed


def test_what_has_no_policies_cannot_be_replayed():
    with make_server(make_board()) as server:
        answer = httpx.post(server.url + "/ui/score/replay?policy=orca", json={})
        assert answer.status_code == 400
        assert "cannot replay" in answer.json()["error"]["message"]
