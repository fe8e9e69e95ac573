"""The bounded part of the oracle: each encoder with some columns of its fit, asked about some of all columns."""

from __future__ import annotations

import random

from tests.oracles.tally import Tally
from tests.oracles.windtunnel_columns.full import every_case, run


def test_encoders_answer_or_refuse_columns_of_every_kind_as_their_sources_do():
    tally = Tally()
    run(random.Random(4).sample(every_case(), 16), tally, every=14)
    assert not tally.faults, "\n".join([tally.line("windtunnel_columns"), *tally.faults[:20]])
    assert tally.counts["equal"] >= 60, tally.line("windtunnel_columns")
