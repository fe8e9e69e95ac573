from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from mlsys_core.profiling import Recorder
from mlsys_core.profiling.timeline import timeline_data, timeline_html


class Page(HTMLParser):
    """Collects what a browser would see: each script's text, and every attribute that names something to load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self._in_script = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._in_script = tag == "script"
        self.scripts += [""] if self._in_script else []
        self.loads += [value for name, value in attrs if name in ("src", "href") and value and value != "data:,"]

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data


def test_columns_are_what_the_page_draws(clock: Any) -> None:
    recorder = Recorder(clock_ns=clock, process="engine")
    clock.advance(1000)
    recorder.complete("a", 1000, 1010, track="requests", request="7")
    recorder.complete("b", 1002, 1005, track="requests")
    recorder.complete("a", 1008, 1020, track="requests", request="7")
    recorder.count("queue", 3)
    recorder.count("queue", float("nan"))
    recorder.instant("mark", track="requests")
    data = timeline_data(recorder.recording())
    assert data["wall_ns"] == 20
    (track,) = data["tracks"]
    assert track["label"].startswith("requests · engine")
    names, args = data["names"], data["args"]
    rows = [
        [
            (s, d, names[n], args[a])
            for s, d, n, a in zip(*(row[k] for k in ("start", "duration", "name", "args")), strict=True)
        ]
        for row in track["rows"]
    ]
    known = '{"request": "7"}'
    assert rows == [[(0, 10, "a", known)], [(2, 3, "b", "")], [(8, 12, "a", known)]]
    assert track["instants"]["at"] == [0]
    (counter,) = data["counters"]
    assert (list(counter["at"]), list(counter["value"]), counter["min"], counter["max"]) == ([0], [3], 3, 3)


def test_the_page_loads_nothing_and_names_cannot_break_out_of_it() -> None:
    recorder = Recorder(process="<img src=x>")
    evil = "</script><script>alert(1)</script> __TABLE__ & \u2028"
    with recorder.span(evil, note="<!-- </script>"):
        pass
    page = timeline_html(recorder.recording(), title="<b>run</b> __DATA__")
    seen = Page(page)
    assert seen.loads == []
    assert len(seen.scripts) == 2
    assert json.loads(seen.scripts[0])["names"] == [evil]
    assert "img" not in seen.tags
    assert "b" not in seen.tags
    assert not re.search(r"https?://", page)


def test_dropped_events_and_the_table_are_on_the_page() -> None:
    recorder = Recorder(max_events=2)
    for _ in range(5):
        with recorder.span("step"):
            pass
    page = timeline_html(recorder.recording(), title="run")
    assert "dropped events: 3," in page
    assert "<td>step</td><td>2</td>" in page


def test_an_empty_recording_has_a_page_too() -> None:
    assert "events: 0," in timeline_html(Recorder().recording(), title="empty")


@pytest.fixture
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
    )
    assert path, "no Chromium on PATH: run scripts/install_chromium.sh (make browser does)"
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.mark.browser
def test_the_page_in_a_browser(browser: Any, tmp_path: Path) -> None:
    recorder = Recorder(clock_ns=lambda: 0, max_events=200_000)
    for number in range(100_000):
        recorder.complete("step", number * 1000, number * 1000 + 900, number=number)
    recorder.complete("request", 0, 60_000_000, track="requests")
    path = tmp_path / "run.html"
    path.write_text(timeline_html(recorder.recording(), title="run"), encoding="utf-8")

    page = browser.new_page(viewport={"width": 1000, "height": 700})
    problems: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    detail, frame = page.locator("#detail"), page.locator("#frame")

    def shows(pattern: str) -> None:
        page.wait_for_function("p => new RegExp(p).test(document.getElementById('range').textContent)", arg=pattern)

    shows(r"^0 ns to 99\.9999 ms \(99\.9999 ms\)$")
    box = page.locator("#chart").bounding_box()
    left, top, width = box["x"] + 190, box["y"] + 24, box["width"] - 190
    first_row, second_track = top + 9, top + 9 + 18 + 6
    page.mouse.click(left + width * 0.3, second_track)
    assert detail.text_content().startswith("request: 60 ms, from 0 ns on")
    page.mouse.click(left + width * 0.9, second_track)
    assert detail.text_content() == "", "nothing is there"
    page.mouse.dblclick(left + width * 0.3, first_row)
    shows(r"\(990 ns\)$")  # the span, 900 ns, with a margin on both sides
    page.mouse.click(left + width * 0.5, first_row)
    assert re.match(r"step: 900 ns, from [\d.]+ ms on\n\{\"number\": \d+\}", detail.text_content())
    for key, pattern in (("0", r"\(99\.9999 ms\)$"), ("w", r"\(69\.9999 ms\)$"), ("s", r"\(99\.9999 ms\)$")):
        frame.press(key)
        shows(pattern)
    page.get_by_role("button", name="Zoom in (W)").click()
    frame.press("d")
    shows(r"^25\.5 ms to 95\.4999 ms")
    page.mouse.move(left + width * 0.5, first_row)
    page.mouse.down()
    page.mouse.move(left + width * 0.6, first_row, steps=4)
    page.mouse.up()
    shows(r"^18\.5 ms to 88\.49")
    assert problems == []
    assert requests == [path.as_uri()]
