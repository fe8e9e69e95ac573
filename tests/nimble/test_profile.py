"""Tables of where time goes, from tasks made up here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from mlsys_nimble.cli.explain import profile


def ran(operator: str, begin_ns: int, end_ns: int) -> SimpleNamespace:
    return SimpleNamespace(operator=operator, begin_ns=begin_ns, end_ns=end_ns)


def test_medians_over_replays_and_sums_over_tasks():
    found = profile(
        [
            [ran("conv", 0, 10), ran("conv", 2, 8), ran("add", 10, 11)],
            [ran("conv", 100, 120), ran("conv", 100, 110), ran("add", 120, 123)],
            [ran("conv", 0, 9_000), ran("conv", 0, 1), ran("add", 9_000, 9_002)],
        ]
    )
    assert [(one.name, one.num_tasks) for one in found.operators] == [("conv", 2), ("add", 1)]
    assert found.operators[0].seconds == pytest.approx(30e-9)
    assert found.operators[1].seconds == pytest.approx(2e-9)
    assert found.elapsed_s == pytest.approx(23e-9)
    assert found.busy_s == pytest.approx(32e-9)
    assert found.by_kind({"conv": "Convolution"}) == pytest.approx({"Convolution": 30e-9, "other": 2e-9})


def test_nothing_to_profile():
    with pytest.raises(ValueError, match="no replay"):
        profile([])
    assert profile([[]]).operators == ()
