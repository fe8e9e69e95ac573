from __future__ import annotations

from pathlib import Path

from tests.oracles.journal import Journal


def test_a_run_goes_on_where_it_was(tmp_path: Path):
    path = tmp_path / "of" / "run.jsonl"
    assert Journal(path).read() == {}
    Journal(path).add("one", ([["case", "equal", ""]], None))
    Journal(path).add("two", ([], "too large"))
    with path.open("a") as file:
        file.write('["three", [["ca')
    assert Journal(path).read() == {"one": [[["case", "equal", ""]], None], "two": [[], "too large"]}


def test_without_a_file_nothing_is_kept():
    Journal(None).add("one", 1)
    assert Journal(None).read() == {}
