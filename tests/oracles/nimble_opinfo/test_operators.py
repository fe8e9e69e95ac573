"""A sixth of the operators that torch has test data for: equal to eager, or refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.oracles.nimble_opinfo import plan, refusals
from tests.oracles.nimble_opinfo.judge import Tally

PARTS = 6


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_operators_give_what_eager_gives(part: int):
    tally = Tally("nimble-opinfo, bounded")
    for work in plan.bounded():
        if work.number % PARTS == part:
            for judgement in plan.judgements(work):
                tally.add(judgement)
    assert tally.faults == []
    assert tally.counts["equal"] > 15


def test_the_page_of_refusals_is_true():
    assert len(refusals.listed()) > 30
    assert list(refusals.differences()) == []
