"""The figures of the documentation are those of the result files."""

from __future__ import annotations

import pytest
from mlsys_bench.figures.__main__ import documents
from mlsys_bench.figures.pages import files_of, filled, index_page, loose_figures
from mlsys_bench.figures.results import RESULTS, number, processor, table

PAGES = documents()


@pytest.mark.parametrize("path", [path for path, text in PAGES.items() if "<!-- figures:" in text])
def test_tables_are_those_of_the_files(path: str) -> None:
    assert PAGES[path] == filled(PAGES[path]), "`make figures` writes the tables anew"


@pytest.mark.parametrize("path", [path for path in PAGES if not path.startswith("docs/adr/")])
def test_text_has_no_figure_that_no_table_holds(path: str) -> None:
    """Each figure is in a table, or its paragraph says that it was measured by hand, and how."""
    assert list(loose_figures(PAGES[path])) == []


def test_each_file_is_cited_and_the_index_is_up_to_date() -> None:
    cited = {name for text in PAGES.values() for name in files_of(text)}
    assert cited == {path.name for path in RESULTS.glob("*.json*")}
    assert (RESULTS / "README.md").read_text(encoding="utf-8") == index_page(PAGES), "`make figures` writes it anew"


def test_a_figure_of_the_text_that_differs_from_its_table_is_found() -> None:
    page = "## Speed\n<!-- figures: x.y a.json -->\n\n| 1.25x |\n\n<!-- end -->\nIt is 1.25x, not 1.26x (goal 1.2x).\n"
    assert [figure for figure, _ in loose_figures(page)] == ["1.26"]
    assert list(loose_figures(page.replace("It is", "By hand it is"))) == []
    assert list(loose_figures("## How\nIt takes 3 ms (`python benchmarks/core/recorder.py`).\n")) != []


def test_markdown() -> None:
    assert table(["a", "b"], [["x", "1.5"], ["y", ""]]) == "| a | b |\n| --- | ---: |\n| x | 1.5 |\n| y |  |"
    assert [number(value) for value in (0.019067, 41.52, 1234.5, 2.0)] == ["0.0191", "41.5", "1,234", "2"]
    assert processor("orca-native-spr.json") == "Sapphire Rapids"
