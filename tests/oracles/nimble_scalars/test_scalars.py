"""A sample of operators with numbers gives what eager gives; ``full.py`` runs all."""

from __future__ import annotations

import pytest
from mlsys_nimble.capture import builder

from tests.oracles.nimble_opinfo.judge import Tally
from tests.oracles.nimble_scalars.cases import DTYPES, OPERATORS
from tests.oracles.nimble_scalars.run import judgements


def sample(path: str, *, step: int, first: int = 0) -> Tally:
    """Judge every ``step``-th pair of an operator and a dtype; ranks take turns."""
    tally = Tally(path)
    pairs = [(operator, dtype) for operator in OPERATORS for dtype in DTYPES]
    for number, (operator, dtype) in list(enumerate(pairs))[first::step]:
        for each in judgements(operator, dtype, number % 2, path):
            tally.add(each)
    return tally


@pytest.mark.parametrize("path", ["native", "reference"])
def test_numbers_are_taken_as_eager_takes_them(path: str):
    tally = sample(path, step=37, first=3 * (path == "reference"))
    assert tally.faults == []
    assert tally.counts["equal"] > 50


def test_numbers_in_a_wider_dtype_are_wrong(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(builder, "_holds", lambda dtype, number: True)
    assert any(each.verdict == "wrong" for each in judgements("mul", "int32", 1, "native"))
