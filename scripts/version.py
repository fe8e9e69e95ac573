"""Set the version of all distributions: ``make version VERSION=0.2.0``; without one, print it.

The version stands in each package's ``__init__`` (a distribution is built alone, and reads its own); this script is the
one place that writes it, together with the ranges in which the distributions need each other. A test compares them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LITERAL = re.compile(r'^(__version__|version) = "([^"]+)"$', re.M)
NEEDED = re.compile(r'"(mlsys-[a-z-]+)>=[\d.]+,<[\d.]+"')


def holders(root: Path) -> list[Path]:
    """Return the files that state a version: the packages' ``__init__``, and the meta package's project file."""
    packages = [path for folder in ("packages", "plugins", "benchmarks") for path in (root / folder).rglob("mlsys_*")]
    inits = [path / "__init__.py" for path in packages if path.parent.name == "src"]
    return sorted([*inits, root / "packages" / "toolkit" / "pyproject.toml"])


def versions(root: Path) -> dict[str, str]:
    """Return the version that each holder states, by its path below ``root``."""
    found = {path.relative_to(root).as_posix(): LITERAL.search(path.read_text()) for path in holders(root)}
    return {path: match[2] if match else "none" for path, match in found.items()}


def needed(version: str) -> str:
    """Return the range in which a distribution of ``version`` needs the others: its own minor version.

    Example:
        >>> needed("0.2.1")
        '>=0.2,<0.3'
    """
    major, minor, *_ = version.split(".")
    return f">={major}.{minor},<{major}.{int(minor) + 1}"


def set_version(root: Path, version: str) -> None:
    """Write ``version`` into every holder, and the ranges into every project file."""
    for path in holders(root):
        path.write_text(LITERAL.sub(rf'\1 = "{version}"', path.read_text(), count=1))
    for path in [*root.glob("p*/*/pyproject.toml"), root / "benchmarks" / "pyproject.toml"]:
        path.write_text(NEEDED.sub(rf'"\1{needed(version)}"', path.read_text()))


def main() -> None:
    """Set the version that was given, or print the one there is."""
    if len(sys.argv) > 1:
        if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", sys.argv[1]):
            sys.exit(f"version: {sys.argv[1]!r} is not of the form 1.2.3, 1.2.3a1, 1.2.3b1 or 1.2.3rc1")
        set_version(ROOT, sys.argv[1])
    print(*sorted(set(versions(ROOT).values())))


if __name__ == "__main__":
    main()
