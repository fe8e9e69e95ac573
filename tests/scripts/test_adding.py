"""The file lists of docs/adding.md name every source file that knows the example, and no other."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `([^`]+)` \| [^|]+ \| (?:`(.+)`)? ?\|$", flags=re.M)
SECTIONS = (ROOT / "docs" / "adding.md").read_text().split("\n## ")[1:]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0])
def test_a_list_names_the_files_that_know_its_example(section: str):
    rows = ROW.findall(section)
    pattern = rows[0][1].replace("\\|", "|")
    packages = {"/".join(file.split("/")[:2]) for file, _ in rows}
    command = ["git", "grep", "-lP", pattern, "--", *sorted(f"{package}/src" for package in packages)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert sorted(found) == sorted(file for file, _ in rows)


def test_there_is_a_list_for_each_kind():
    assert len(SECTIONS) == 5


@pytest.mark.parametrize(("kind", "most"), [("A model family", 2), ("A converter", 2), ("An operator", 6)])
def test_the_parts_stand_beside_each_other(kind: str, most: int):
    (section,) = (section for section in SECTIONS if section.startswith(kind))
    assert len(ROW.findall(section)) <= most
