"""Files that a call enters are told in order, once each, whichever thread enters them."""

from __future__ import annotations

import threading
from pathlib import Path

from mlsys_core import errors
from mlsys_core.report import facts_html

from tests.ways import ROOT, files_of_page, files_passed, num_lines


def test_files_are_those_whose_functions_run():
    assert files_passed(lambda: facts_html("t", {"a": 1})) == ["mlsys_core/report.py"]
    assert files_passed(lambda: 1) == []


def test_threads_of_the_call_count():
    def call():
        thread = threading.Thread(target=facts_html, args=("t", {"a": 1}))
        thread.start()
        thread.join()

    assert files_passed(call) == ["mlsys_core/report.py"]


def test_a_page_lists_files_by_items(tmp_path, monkeypatch):
    page = tmp_path / "way.md"
    page.write_text(
        "Text with `mlsys_core/loop/queue.py`.\n\n1. `mlsys_core/a.py` does this.\n| `mlsys_core/b/c.py` | that |\n"
    )
    monkeypatch.setattr("tests.ways.ROOT", tmp_path)
    assert files_of_page("way.md") == ["mlsys_core/a.py", "mlsys_core/b/c.py"]


def test_lines_are_counted():
    assert num_lines(["mlsys_core/errors.py"]) == len(Path(errors.__file__).read_text().splitlines())
    assert (ROOT / "packages").is_dir()


def test_threads_that_were_started_before_count_and_their_start_does_not():
    asked, done = threading.Event(), threading.Event()

    def work() -> None:
        asked.wait()
        facts_html("t", {"a": 1})
        done.set()

    def start() -> None:
        num_lines([])
        threading.Thread(target=work, daemon=True).start()

    def call() -> None:
        asked.set()
        done.wait()

    assert files_passed(call, start=start) == ["mlsys_core/report.py"]
