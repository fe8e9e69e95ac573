"""The pages mlsys writes, in a real Chromium: they show what they should, load nothing, and log no error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlsys_core.report import Dialogue, Figure, Section, Table, write

pytestmark = pytest.mark.browser


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    """Open a file; fails at the end if the page asked for anything else or logged an error."""
    context = browser.new_context(viewport={"width": 900, "height": 900})
    page = context.new_page()
    asked: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)

    def go(path: Path) -> Any:
        page.goto(path.as_uri())
        return page

    yield go
    context.close()
    assert len(asked) == 1, f"the page is not self-contained: {asked[1:]}"
    assert errors == []


def test_the_demo_report(visit: Any, tmp_path: Path):
    from matplotlib.figure import Figure as MplFigure
    from mlsys_core.plot import to_svg

    figure = MplFigure(figsize=(5, 2))
    figure.subplots().plot([1, 2, 3])
    body = [
        "Some text.",
        Dialogue("Why?", "Because.", "2 tokens"),
        Table(["a", "b"], [["1", "2"]]),
        Figure(to_svg(figure), "A line."),
    ]
    sections = [Section("First part", body), Section("Second part", ["It failed."], status="failed")]
    page = visit(write(tmp_path / "report.html", "A report", sections, {"python": "3.11"}))
    assert page.title() == "A report"
    assert page.locator("figure svg").bounding_box()["width"] > 200
    assert page.locator(".dialogue .a").inner_text() == "Because."
    assert page.locator("section .status").all_inner_texts() == ["ok", "failed"]
    page.get_by_role("link", name="Second part").click()
    assert page.evaluate("location.hash") == "#part-2"
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 900, "the page must not scroll sideways"
