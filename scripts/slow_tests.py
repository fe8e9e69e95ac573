"""Write tests/slow.txt, the tests that ``make test`` leaves out, from pytest's report of a run of it.

Run as ``pytest --quick --keep-slow --junitxml=FILE ...``, then ``python scripts/slow_tests.py FILE [SHARE]``: the tests
listed are the slowest, which take SHARE (0.65) of the time together.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "slow.txt"


def seconds_by_test(report: Path) -> dict[str, float]:
    """Return the seconds of each test function in a JUnit report, all of its cases together, by ``file::function``."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).iter("testcase"):
        module, name = case.get("classname", ""), case.get("name", "").partition("[")[0]
        seconds[f"{module.replace('.', '/')}.py::{name}"] += float(case.get("time", "0"))
    return seconds


def slowest(seconds: Mapping[str, float], share: float) -> list[str]:
    """Return the fewest tests that take ``share`` of all the time.

    Example:
        >>> slowest({"a": 6.0, "b": 3.0, "c": 1.0}, 0.7)
        ['a', 'b']
    """
    wanted, names, total = share * sum(seconds.values()), [], 0.0
    for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
        if total >= wanted:
            break
        names.append(name)
        total += value
    return names


if __name__ == "__main__":
    found = slowest(seconds_by_test(Path(sys.argv[1])), float(sys.argv[2]) if len(sys.argv) > 2 else 0.65)
    tests = [name for name in sorted(found) if (ROOT / name.partition("::")[0]).is_file()]  # classes have no file
    LIST.write_text(
        "# Left out of make test, in make test-all. Written by scripts/slow_tests.py.\n" + "\n".join(tests) + "\n"
    )
    print(f"{LIST}: {len(tests)} tests")
