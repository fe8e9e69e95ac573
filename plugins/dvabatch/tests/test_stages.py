"""Stages and their costs."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_dvabatch.stages.simulated import LinearStage, StagedModel, parse_stages

TIMES_MS = st.floats(0, 1e3).map(lambda value: round(value, 3))


@given(st.lists(st.tuples(TIMES_MS, TIMES_MS).filter(any), min_size=1, max_size=5), st.integers(1, 64))
def test_a_model_costs_the_sum_of_its_stages(stages_ms: list[tuple[float, float]], batch_size: int):
    model = parse_stages(",".join(f"{fixed} + {per_item}" for fixed, per_item in stages_ms))
    expected_s = sum(fixed + per_item * batch_size for fixed, per_item in stages_ms) / 1e3
    assert len(model.stages) == len(stages_ms)
    assert model.seconds(batch_size) == pytest.approx(expected_s)
    assert model.peak_rps(batch_size) == pytest.approx(batch_size / expected_s)


def test_a_stage_may_cost_the_same_for_any_batch():
    assert parse_stages("5").stages == (LinearStage(0.005, 0.0),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' in '' is no stage"),
        ("4+0.5,", "'' in '4+0.5,' is no stage"),
        ("4+0.5+1", "'4+0.5+1' in '4+0.5+1' is no stage"),
        ("4+", "'4+' in '4+' is no stage"),
        ("0+0", "at least one above 0"),
        ("-1+2", "0 or more"),
        ("inf", "finite"),
        ("1,nan+1", "finite"),
    ],
)
def test_bad_stages_are_refused(text: str, says: str):
    with pytest.raises(InvalidInputError, match=re.escape(says)):
        parse_stages(text)


def test_bad_records_are_refused():
    with pytest.raises(InvalidInputError, match="at least one stage"):
        StagedModel(())
    with pytest.raises(InvalidInputError, match="finite"):
        LinearStage(math.nan, 1.0)
