"""Fill the marked places of a page."""

from __future__ import annotations

import re
from importlib import import_module

BLOCK = re.compile(r"<!-- figures: (?P<call>[^>]+?)\s*-->\n(?P<body>.*?)<!-- end -->", re.DOTALL)


def render(call: str) -> str:
    """Return what ``call`` asks for: a renderer, ``module.function``, and its files."""
    renderer, *files = call.split()
    module, _, function = renderer.partition(".")
    return str(getattr(import_module(f"mlsys_bench.figures.{module}"), function)(*files))


def filled(page: str) -> str:
    """Return a page's text with what its marks ask for written between them."""
    return BLOCK.sub(_filled, page)


def _filled(block: re.Match[str]) -> str:
    mark = block[0].partition("-->")[0]
    return f"{mark}-->\n\n{render(block['call'])}\n\n<!-- end -->"


def files_of(page: str) -> list[str]:
    """Return the result files that a page's marks name."""
    calls = (block["call"].split()[1:] for block in BLOCK.finditer(page))
    return [name for call in calls for name in call if ".json" in name]
