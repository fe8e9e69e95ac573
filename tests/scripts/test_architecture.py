"""docs/architecture.md has the rooms that the packages' READMEs have."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_rooms_of_the_readmes():
    spec = importlib.util.spec_from_file_location("architecture", ROOT / "scripts" / "architecture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.page(ROOT) == module.PAGE.read_text(encoding="utf-8"), "run: python scripts/architecture.py"
    assert module.rooms_table(ROOT).count("\n") > 60
