from __future__ import annotations

from tests.oracles.nimble_zoo.compare import Tally
from tests.oracles.nimble_zoo.page import NO_TIME, page


def test_models_that_a_run_does_not_reach_are_listed_as_before():
    first = Tally()
    first.note("One, prepare", "refused", "a | b")
    first.note("Two, prepare", "refused", "c")
    before = page(first, {"Three": "too large", "Four": NO_TIME}, {"language": 2})
    second = Tally()
    second.note("Two, prepare", "equal")
    after = page(second, dict.fromkeys(("One", "Three", "Four"), NO_TIME), {"language": 1}, before)
    assert [line for line in after.splitlines() if line.startswith(("| O", "| T", "- "))] == [
        "| One, prepare | a \\| b |",
        f"- Four: {NO_TIME}",
        "- Three: too large",
    ]
    assert "1 models of language. Tally: 1 cases: 1 equal" in after


def test_a_model_that_was_never_reached_is_named():
    assert f"- One: {NO_TIME}" in page(Tally(), {"One": NO_TIME}, {}, "")
