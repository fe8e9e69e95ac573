"""Write the tables of all pages: ``python -m mlsys_bench.figures``."""

from __future__ import annotations

from mlsys_bench.figures.pages import filled
from mlsys_bench.figures.results import ROOT


def documents() -> dict[str, str]:
    """Return the texts of the documentation by path below the repository."""
    patterns = ("README.md", "docs/**/*.md", "packages/*/README.md", "plugins/*/README.md")
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for pattern in patterns
        for path in sorted(ROOT.glob(pattern))
    }


def main() -> None:
    """Write what differs."""
    pages = documents()
    for path, text in pages.items():
        if (written := filled(text)) != text:
            (ROOT / path).write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
