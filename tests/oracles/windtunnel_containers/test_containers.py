"""The bounded part of the oracle: a sample of all pipelines, and of those with libraries that are installed here."""

from __future__ import annotations

import random

import pytest

from tests.oracles.tally import Tally
from tests.oracles.windtunnel_containers.full import every_pipeline, run

SAMPLE = 30


@pytest.mark.parametrize("library", ["", "xgboost"])
def test_what_a_step_hands_on_reaches_the_next_in_its_container(library: str):
    chosen = [names for names in every_pipeline() if names[-1].startswith(library)]
    if not chosen:
        pytest.skip(f"{library} is not installed")
    tally = Tally()
    run(random.Random(5).sample(chosen, SAMPLE), tally)
    assert not tally.faults, "\n".join([tally.line("windtunnel_containers"), *tally.faults[:20]])
    assert tally.counts["equal"] >= SAMPLE, tally.line("windtunnel_containers")
