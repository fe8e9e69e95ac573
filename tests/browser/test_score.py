"""The score and the chat in a real Chromium, on a real model behind a key; and a recording without a server."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.browser

KEY = "sesame"
WAIT_MS = 90_000


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server in processes, as a user starts it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["orca", "serve", "smollm2-135m-instruct", "--port", str(port), "--api-key", KEY, "--log-level", "warning"]
    words += ["--max-model-len", "1024", "--kv-tokens", "8192"]
    running = subprocess.Popen([sys.executable, "-m", "mlsys_core", *words], start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(900):
            try:
                if httpx.get(url + "/health/ready", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                assert running.poll() is None, "the server has ended"
            time.sleep(0.1)
        yield url
    finally:
        running.send_signal(signal.SIGTERM)
        try:
            running.wait(30)
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """``visit(url, key=..., **context options)``; no page may log an error or ask another server."""
    contexts: list[Any] = []
    errors: list[str] = []
    asked: list[str] = []

    def go(url: str, *, key: str | None = KEY, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        if key is not None:
            context.add_init_script(f"sessionStorage.setItem('mlsys-key', '{key}')")
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(url)
        return page

    yield go
    for context in contexts:
        context.close()
    assert [error for error in errors if "401" not in error] == []
    hosts = {re.sub(r"^(\w+://[^/]*).*", r"\1", url) for url in asked if not url.startswith(("data:", "blob:"))}
    assert len(hosts) <= 1, f"the page asked others: {hosts}"


def live(page: Any) -> Any:
    page.locator("#state.live").wait_for()
    return page


def ask(page: Any, text: str, max_tokens: int) -> None:
    page.locator("details summary").click()
    page.locator("#chat-max_tokens").fill(str(max_tokens))
    page.locator("#chat-temperature").fill("0")
    page.locator("#chat-input").fill(text)
    page.keyboard.press("Enter")


def wait_of(page: Any) -> str:
    from playwright.sync_api import expect

    expect(page.locator("#why .wait")).to_be_visible()
    return page.locator("#why .wait").inner_text()


def test_a_key_is_asked_for(visit: Callable[..., Any], server: str):
    from playwright.sync_api import expect

    page = visit(server, key=None)
    expect(page.locator("#key-dialog")).to_be_visible()
    page.locator("#key-input").fill("guess")
    page.keyboard.press("Enter")
    expect(page.locator("#key-note")).to_have_text("That key is not known here.")
    page.locator("#key-input").fill(KEY)
    page.keyboard.press("Enter")
    live(page)
    expect(page.locator("#key-dialog")).to_be_hidden()
    assert page.evaluate("sessionStorage.getItem('mlsys-key')") == KEY
    assert KEY not in page.evaluate("JSON.stringify(localStorage)")


def test_a_chat_streams_is_kept_and_moves_the_score(visit: Callable[..., Any], server: str):
    from playwright.sync_api import expect

    page = live(visit(server))
    before = int(page.locator("#scroll").get_attribute("max") or 0)
    page.locator("details summary").click()
    page.locator("#chat-system").fill("Answer in one sentence.")
    page.locator("details summary").click()
    ask(page, "What is the capital of France? <img src=x onerror=alert(1)>", 24)
    expect(page.locator("#chat-note")).to_contain_text("tokens, ", timeout=WAIT_MS)
    answer = page.locator(".assistant .body").inner_text()
    assert answer.strip()
    assert page.locator("#chat-log img").count() == 0, "text is never HTML"
    after = int(page.locator("#scroll").get_attribute("max") or 0)
    assert after > before, "columns have come"
    page.reload()
    live(page)
    expect(page.locator(".assistant .body")).to_have_text(re.compile(re.escape(answer.split("\n")[0])))
    assert page.locator("#chat-system").input_value() == "Answer in one sentence."
    page.locator("#chat-new").click()
    expect(page.locator(".message")).to_have_count(0)
    assert page.locator("#chat-list option").count() == 2


def test_an_answer_is_stopped(visit: Callable[..., Any], server: str):
    from playwright.sync_api import expect

    page = live(visit(server))
    ask(page, "Write the numbers from 1 to 500, one a line.", 700)
    expect(page.locator(".assistant .body")).not_to_be_empty(timeout=WAIT_MS)
    page.locator("#chat-send").click()
    expect(page.locator("#chat-note")).to_have_text("stopped")
    expect(page.locator("#chat-send")).to_have_text("Send")
    headers = {"authorization": f"Bearer {KEY}"}
    for _ in range(300):  # the engine's request leaves too
        rows = httpx.get(server + "/ui/score/recording", headers=headers).json()["rows"]
        if rows and rows[-1]["reason"] is not None:
            break
        time.sleep(0.1)
    assert rows[-1]["reason"] == "abort", rows


def test_a_stall_is_found_by_clicking(visit: Callable[..., Any], server: str):
    from playwright.sync_api import expect

    page = live(visit(server))
    page.locator("#load").fill("6")
    expect(page.locator("#load-count")).to_have_text("6")
    page.locator("#waits button").nth(3).wait_for()
    page.locator("#waits button").first.click()
    page.locator("#load").fill("0")
    whole, _, parts = wait_of(page).partition(" ms: ")
    spent = [float(part.split()[0]) for part in parts.split(", ")]
    assert sum(spent) == pytest.approx(float(whole), abs=0.6 * len(spent)), "the parts are the whole wait"
    expect(page.locator("#state")).to_have_text("paused")
    row = re.search(r"Request (\d+)", page.locator("#why").inner_text())
    box = page.locator("#score").bounding_box()
    page.locator("#score").click(position={"x": 58 + 7, "y": 114})  # the first square of the first row in view
    assert "Request" in page.locator("#why").inner_text()
    assert row is not None
    assert box["width"] > 300
    page.locator("#pause").click()
    expect(page.locator("#state")).to_have_text("live")


def test_what_ran_before_the_page_was_opened_is_on_it(visit: Callable[..., Any], server: str):
    from playwright.sync_api import expect

    body = {"model": "smollm2-135m-instruct", "prompt": "One fish, two", "max_tokens": 9, "temperature": 0}
    headers = {"authorization": f"Bearer {KEY}"}
    time.sleep(6)  # the last page's five seconds of grace: nobody looks
    assert httpx.post(server + "/v1/completions", json=body, headers=headers, timeout=60).status_code == 200
    page = live(visit(server))
    expect(page.locator("#waits button").first).to_be_visible()
    rows = httpx.get(server + "/ui/score/recording", headers=headers).json()["rows"]
    assert rows[-1]["max_new"] == 9
    assert rows[-1]["reason"] is not None


def test_on_a_phone(visit: Callable[..., Any], server: str):
    from playwright.sync_api import expect

    page = live(visit(server, viewport={"width": 390, "height": 844}, color_scheme="dark"))
    ask(page, "Say hello.", 6)
    expect(page.locator("#chat-note")).to_contain_text("tokens, ", timeout=WAIT_MS)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390, "it must not scroll sideways"
    assert page.locator("#chat-send").bounding_box()["x"] < 390


def test_a_recording_opens_without_a_server(visit: Callable[..., Any], tmp_path: Path):
    from mlsys_core.cli.main import run
    from playwright.sync_api import expect

    def row(number: int, opened: float) -> dict[str, Any]:
        return {"row": number, "opened": opened, "prompt": 4, "max_new": 9}

    def tables(changes: list[Any]) -> dict[str, Any]:
        return {"tables": changes}

    recording = {
        "format": "mlsys-score",
        "version": 1,
        "system": "orca",
        "unit": "iteration",
        "facts": {"model": "tiny", "num_blocks": 40, "policy": "orca"},
        "rows": [row(1, 0.0), row(17, 5.0)],
        "columns": [
            {"n": 1, "t": 0, "ms": 10, "split": {"prefill": 10}, "squares": [[1, "p", 4, 0]]}
            | tables([[1, 0, [5, 6]]]),
            {"n": 2, "t": 22, "ms": 29, "split": {"prefill": 29}, "squares": [[1, "d", 1, 0], [17, "p", 100, 0]]}
            | tables([[17, 0, [5, 8]]]),
        ],
    }
    (tmp_path / "score.json").write_text(json.dumps(recording))
    assert run(["trace", "open", str(tmp_path / "score.json"), "--no-open"]) == 0
    page = visit((tmp_path / "score.html").as_uri(), key=None)
    expect(page.locator("#state")).to_have_text("recording")
    expect(page.locator("#blocks-note")).to_have_text("3 of 40 blocks held, 1 shared")
    page.locator("#score").click(position={"x": 58 + 14 + 7, "y": 114})  # request 1 in the second column
    assert wait_of(page) == "41 ms: 29 beside request 17's prefill, 12 between two iterations"
    page.locator("#score").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#why")).to_contain_text("Request 17, iteration 2: prefill of 100 tokens.")
    assert wait_of(page) == "46 ms: 29 for its own prefill, 17 in the queue"
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#why")).to_contain_text("Request 1, iteration 1: prefill of 4 tokens.")
    expect(page.locator(".chat")).to_be_hidden()
