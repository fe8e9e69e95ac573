"""Write the table of rooms in docs/architecture.md from the packages' READMEs; a test compares the two."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"


def rooms_table(root: Path) -> str:
    """Return a table of each package's rooms and their purpose, from the top down."""
    lines = ["| package | room | what it holds |", "| --- | --- | --- |"]
    for readme in sorted(root.glob("p*/*/README.md")):
        block = re.search(r"## Rooms\n.*?```text\n(.*?)```", readme.read_text(encoding="utf-8"), flags=re.S)
        for line in block[1].splitlines() if block else []:
            name, _, purpose = line.strip().partition(" ")
            room = f"&nbsp;&nbsp;`{name}`" if line.startswith(" ") else f"`{name}`"
            lines.append(f"| {readme.parent.name} | {room} | {purpose.strip()} |")
    return "\n".join(lines)


def page(root: Path) -> str:
    """Return the page with its table written anew."""
    text = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    return re.sub(
        r"<!-- rooms -->.*<!-- /rooms -->",
        lambda _: f"<!-- rooms -->\n{rooms_table(root)}\n<!-- /rooms -->",
        text,
        flags=re.S,
    )


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(ROOT), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
