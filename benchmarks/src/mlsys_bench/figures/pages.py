"""Fill the marked places of a page, and find figures of its text that no table holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module

_BLOCK = re.compile(r"<!-- figures: (?P<call>[^>]+?)\s*-->\n(?P<body>.*?)<!-- end -->", re.DOTALL)
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


def render(call: str) -> str:
    """Return what ``call`` asks for: a renderer, ``module.function``, and its files."""
    renderer, *files = call.split()
    module, _, function = renderer.partition(".")
    return str(getattr(import_module(f"mlsys_bench.figures.{module}"), function)(*files))


def filled(page: str) -> str:
    """Return a page's text with what its marks ask for written between them."""
    return _BLOCK.sub(_filled, page)


def _filled(block: re.Match[str]) -> str:
    mark = block[0].partition("-->")[0]
    return f"{mark}-->\n\n{render(block['call'])}\n\n<!-- end -->"


def files_of(page: str) -> list[str]:
    """Return the result files that a page's marks name."""
    calls = (block["call"].split()[1:] for block in _BLOCK.finditer(page))
    return [name for call in calls for name in call if ".json" in name]


def loose_figures(page: str) -> Iterator[tuple[str, str]]:
    """Yield each figure of a page's text that none of its tables holds, with its paragraph.

    Looks at sections that have a table of figures, and at paragraphs that cite a benchmark. Left out are code, goals
    ("goal 1.2x"), numbers that the page lists as ``<!-- settings: 0.1, 16 -->``, and paragraphs that say "by hand",
    with what their ":" leads to: what was measured without a file says so, with the command.
    """
    held = set(_FIGURE.findall(" ".join(block["body"] for block in _BLOCK.finditer(page))))
    held.update(re.findall(r"[\d.,]*\d", " ".join(_SETTINGS.findall(page))))
    for section in re.split(r"^## ", page, flags=re.MULTILINE):
        for paragraph in _measured(section):
            found = _FIGURE.findall(_NO_FIGURE.sub("", paragraph))
            yield from ((figure, paragraph) for figure in found if figure not in held)


def _measured(section: str) -> Iterator[str]:
    """Yield the paragraphs whose figures a table must hold."""
    has_table = bool(_BLOCK.search(section))
    text = _HIDDEN.sub("", _BLOCK.sub("", section))
    is_exempt = introduces = False
    for paragraph in re.split(r"\n(?:\n|(?=- ))", text):
        is_exempt = "by hand" in paragraph.lower() or (is_exempt and introduces)
        introduces = paragraph.endswith(":")
        if not is_exempt and (has_table or re.search(r"benchmarks/\w+/\w+\.py|mlsys bench \w", paragraph)):
            yield paragraph
