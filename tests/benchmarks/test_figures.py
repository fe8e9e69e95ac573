"""The figures of the documentation are those of the result files."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from mlsys_bench.figures.__main__ import documents
from mlsys_bench.figures.pages import BLOCK, files_of, filled
from mlsys_bench.figures.results import RESULTS, number, processor, table

PAGES = documents()
_SETTINGS = re.compile(r"<!-- settings: (.*?) -->", re.DOTALL)
_FIGURE = re.compile(
    r"(?<![\w./:-])\d*\.\d+(?![\w-])|(?<![\w.])[\d,.]*\d(?= ?(?:%|x\b|ms\b|us\b|µs\b|tokens/s|GFLOP/s))"
)
_HIDDEN = re.compile(r"```.*?```|<!--.*?-->", re.DOTALL)
_NO_FIGURE = re.compile(
    r"`[^`]*`"  # code
    r"|\b[Gg]oals?\b.*?(?=[;)]|\.\s|$)"
    r"|(?:[Ss]ection|[Ff]igure|[Tt]able)s? [\d.]+(?: and [\d.]+)?"
    r"|\]\([^)]*\)",  # where a link leads
    re.DOTALL,
)


def loose_figures(page: str) -> Iterator[tuple[str, str]]:
    """Yield each figure of a page's text that none of its tables holds, with its paragraph.

    Looks at sections that have a table of figures, and at paragraphs that cite a benchmark. Left out are code, goals
    ("goal 1.2x"), numbers that the page lists as ``<!-- settings: 0.1, 16 -->``, and paragraphs that say "by hand",
    with what their ":" leads to: what was measured without a file says so, with the command.
    """
    held = set(_FIGURE.findall(" ".join(block["body"] for block in BLOCK.finditer(page))))
    held.update(re.findall(r"[\d.,]*\d", " ".join(_SETTINGS.findall(page))))
    for section in re.split(r"^## ", page, flags=re.MULTILINE):
        for paragraph in _measured(section):
            found = _FIGURE.findall(_NO_FIGURE.sub("", paragraph))
            yield from ((figure, paragraph) for figure in found if figure not in held)


def _measured(section: str) -> Iterator[str]:
    """Yield the paragraphs whose figures a table must hold."""
    has_table = bool(BLOCK.search(section))
    text = _HIDDEN.sub("", BLOCK.sub("", section))
    is_exempt = introduces = False
    for paragraph in re.split(r"\n(?:\n|(?=- ))", text):
        is_exempt = "by hand" in paragraph.lower() or (is_exempt and introduces)
        introduces = paragraph.endswith(":")
        if not is_exempt and (has_table or re.search(r"benchmarks/\w+/\w+\.py|mlsys bench \w", paragraph)):
            yield paragraph


@pytest.mark.parametrize("path", [path for path, text in PAGES.items() if "<!-- figures:" in text])
def test_tables_are_those_of_the_files(path: str) -> None:
    assert PAGES[path] == filled(PAGES[path]), "`make figures` writes the tables anew"


@pytest.mark.parametrize("path", [path for path in PAGES if not path.startswith("docs/adr/")])
def test_text_has_no_figure_that_no_table_holds(path: str) -> None:
    """Each figure is in a table, or its paragraph says that it was measured by hand, and how."""
    assert list(loose_figures(PAGES[path])) == []


def test_each_file_is_cited() -> None:
    cited = {name for text in PAGES.values() for name in files_of(text)}
    assert cited == {path.name for path in RESULTS.glob("*.json*")}


def test_a_figure_of_the_text_that_differs_from_its_table_is_found() -> None:
    page = "## Speed\n<!-- figures: x.y a.json -->\n\n| 1.25x |\n\n<!-- end -->\nIt is 1.25x, not 1.26x (goal 1.2x).\n"
    assert [figure for figure, _ in loose_figures(page)] == ["1.26"]
    assert list(loose_figures(page.replace("It is", "By hand it is"))) == []
    assert list(loose_figures("## How\nIt takes 3 ms (`python benchmarks/core/recorder.py`).\n")) != []


def test_markdown() -> None:
    assert table(["a", "b"], [["x", "1.5"], ["y", ""]]) == "| a | b |\n| --- | ---: |\n| x | 1.5 |\n| y |  |"
    assert [number(value) for value in (0.019067, 41.52, 1234.5, 2.0)] == ["0.0191", "41.5", "1,234", "2"]
    assert processor("orca-native-spr.json") == "Sapphire Rapids"
