"""tests/slow.txt: what it names is there, so no test is thought to be left out that runs under another name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = [line for line in (ROOT / "tests" / "slow.txt").read_text().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("file", sorted({name.partition("::")[0] for name in NAMES}))
def test_each_name_is_a_tests(file: str):
    functions = set(re.findall(r"^(?:async )?def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE))
    assert {name.partition("::")[2] for name in NAMES if name.startswith(file)} <= functions
