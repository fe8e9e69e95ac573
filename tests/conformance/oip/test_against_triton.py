"""Hundreds of questions to a real Triton and to ours, answer by answer: equal, or other for a reason that is listed.

``make test-peers`` installs Triton (``benchmarks/peers/pytriton``). ``python -m tests.conformance.oip.habits.compare``
prints the differences with what both servers said.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

for _client in ("tritonclient.http", "tritonclient.grpc"):
    pytest.importorskip(_client)

from tests.conformance.oip.habits.compare import all_cases, brief, compared  # noqa: E402
from tests.conformance.oip.habits.triton import PYTHON  # noqa: E402

TABLE = Path(__file__).with_name("habits") / "differences.json"


def listed() -> dict[str, tuple[str, str]]:
    """Return ours and Triton's answer of each difference that has a reason, by the case's name."""
    return {
        name: (answer["ours"], answer["triton"])
        for entry in json.loads(TABLE.read_text())
        for answer in entry["answers"]
        for name in answer["cases"]
    }


@pytest.mark.slow
@pytest.mark.skipif(
    not PYTHON.exists(), reason=f"no Triton at {PYTHON} (benchmarks/peers/install.sh pytriton; MLSYS_TRITON_PYTHON)"
)
def test_answers_are_those_of_a_real_triton_but_for_listed_differences(tmp_path: Path) -> None:
    found = compared(tmp_path)
    assert len(found) >= 500
    different = {name: each.brief for name, each in found.items() if each.ours != each.triton}
    expected = listed()
    assert {name: each for name, each in different.items() if expected.get(name) != each} == {}, "not listed"
    assert sorted(expected.keys() - different.keys()) == [], "listed, and no difference any more"


def test_the_table_has_a_reason_for_each_difference_and_names_cases_once() -> None:
    entries = json.loads(TABLE.read_text())
    assert all(entry["reason"].endswith(".") for entry in entries)
    names = [name for entry in entries for answer in entry["answers"] for name in answer["cases"]]
    assert len(names) == len(set(names))
    plain = {case.name for case in all_cases()}
    assert {name for name in names if not any(name == each or name.startswith(f"{each}: ") for each in plain)} == set()
    assert all(brief(answer["ours"]) != brief(answer["triton"]) for entry in entries for answer in entry["answers"])
