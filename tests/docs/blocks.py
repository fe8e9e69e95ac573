"""Blocks of code on the pages of the documentation, hidden setup among them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHELLS = ("bash", "sh", "console")
FOLDERS = ("start", "tutorials", "how-to", "explain")  # of docs, beside its own pages
PAGES = ("README.md", "docs/*.md", *(f"docs/{folder}/*.md" for folder in FOLDERS), "p*/*/README.md")
# A fence, or a comment that begins <!-- python: code that readers need not see, run in its place.
_BLOCK = re.compile(
    r"^```(?P<language>[a-z]+)(?: title=\"(?P<title>[^\"\n]+)\")?[^\n]*\n(?P<shown>.*?)^```$"
    r"|^<!-- (?P<hidden_language>[a-z]+)\n(?P<hidden>.*?)^-->$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code of a page."""

    language: str
    text: str
    line: int  # of the page, where the text begins, from 1
    is_hidden: bool = False
    title: str | None = None  # path of the file that the block is


def pages() -> list[Path]:
    """Return all pages."""
    return sorted(path for pattern in PAGES for path in ROOT.glob(pattern))


def blocks_of(page: str) -> list[Block]:
    r"""Return the blocks of a page's text, in order.

    Example:
        >>> blocks_of("Do:\n```python\nf()\n```\n<!-- python\nx = 1\n-->\n")
        [Block(language='python', text='f()\n', line=3, is_hidden=False, title=None),
         Block(language='python', text='x = 1\n', line=6, is_hidden=True, title=None)]
    """
    found = []
    for match in _BLOCK.finditer(page):
        is_hidden = match["hidden_language"] is not None
        text = match["hidden"] if is_hidden else match["shown"]
        language = match["hidden_language"] or match["language"]
        line = page.count("\n", 0, match.start()) + 2
        found.append(Block(language, text, line, is_hidden, match["title"]))
    return found
