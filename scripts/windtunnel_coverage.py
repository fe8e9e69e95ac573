"""Write docs/windtunnel-coverage.md from the table of converters; run it after adding one."""

from __future__ import annotations

from pathlib import Path

from mlsys_windtunnel.convert.coverage import page

PAGE = Path(__file__).resolve().parent.parent / "docs" / "windtunnel-coverage.md"


def main() -> None:
    """Write the page and print its path."""
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(PAGE.parent.parent)}")


if __name__ == "__main__":
    main()
