"""Learning rates over steps."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_windtunnel.finetune.options import Schedule
from mlsys_windtunnel.finetune.train import rate


@given(schedule=st.sampled_from(get_args(Schedule)), num_steps=st.integers(1, 500), data=st.data())
def test_rates_lie_between_zero_and_the_highest(schedule: Schedule, num_steps: int, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, num_steps - 1))
    assert 0 < rate(schedule, step, num_steps) <= 1


@given(num_steps=st.integers(20, 500))
def test_one_cycle_rises_once_and_then_falls(num_steps: int) -> None:
    rates = [rate("onecycle", step, num_steps) for step in range(num_steps)]
    top = rates.index(max(rates))
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] == pytest.approx(1e-4)
