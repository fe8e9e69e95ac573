"""One self-contained HTML page from sections of text, tables and figures; used by ``mlsys demo`` and ``mlsys bench``.

The page loads nothing from anywhere: style and figures (SVG) are inside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class Table:
    """A table; every row has as many cells as there are columns."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row has {len(row)} cells for {len(self.columns)} columns: {row!r}")


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture as SVG text (see ``mlsys_core.plot.to_svg``); it is trusted, so make it yourself."""

    svg: str
    caption: str = ""
    is_wide: bool = False  # shown at its own size, to be scrolled; else as wide as the page


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A question and an answer, as typed and as streamed."""

    question: str
    answer: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Story:
    """Explanation of a section for readers who do not know the system; it goes first. A sentence or two each."""

    done: str  # what was run, on what
    matters: str  # why anybody should care
    reading: str  # how to read the pictures and tables below
    others: str  # what is usually done instead, and where that is better

    @property
    def parts(self) -> Sequence[tuple[str, str]]:
        """Heading and text of each part."""
        headings = ("What was done", "Why it matters", "How to read it", "What others do")
        return list(zip(headings, (self.done, self.matters, self.reading, self.others), strict=True))


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the page: a story, paragraphs (str), tables, figures and dialogues, in order."""

    title: str
    body: Sequence[str | Story | Table | Figure | Dialogue] = ()
    status: Literal["ok", "failed", "skipped"] = "ok"
    data: Mapping[str, object] = field(default_factory=dict)  # the figures as JSON-able values, for machines


def facts_html(title: str, facts: Mapping[str, object]) -> str:
    """Return a small table of facts as HTML, for an object's ``_repr_html_`` in a notebook.

    Example:
        >>> facts_html("a <model>", {"weights": "256 MiB"})
        '<table><caption>a &lt;model&gt;</caption><tr><th scope="row">weights</th><td>256 MiB</td></tr></table>'
    """
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(str(value))}</td></tr>' for name, value in facts.items()
    )
    return f"<table><caption>{escape(title)}</caption>{rows}</table>"


def render(title: str, sections: Sequence[Section], environment: Mapping[str, str]) -> str:
    """Return the page as HTML text; everything but figures is escaped."""
    import jinja2

    loader = jinja2.PackageLoader("mlsys_core", "templates")
    jinja = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    kinds = {Table: "table", Figure: "figure", Dialogue: "dialogue", Story: "story", str: "text"}
    parts = [(section, [(kinds[type(item)], item) for item in section.body]) for section in sections]
    return jinja.get_template("report.html").render(title=title, parts=parts, environment=environment)


def write(path: Path, title: str, sections: Sequence[Section], environment: Mapping[str, str]) -> Path:
    """Write :func:`render`'s page to ``path`` (folders are made) and return it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(title, sections, environment), encoding="utf-8")
    return path
