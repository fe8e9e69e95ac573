"""A bounded part of the oracle: some classes with two option sets each. ``full.py`` runs all: ``make oracles``."""

from __future__ import annotations

from itertools import islice

import pytest
from mlsys_bench.windtunnel.coverage.options import cases, option_sets
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from tests.oracles.tally import Tally
from tests.oracles.windtunnel_options.options import run

pytestmark = pytest.mark.filterwarnings("ignore")


def test_options_are_drawn_from_what_a_class_declares_and_stay_the_same():
    drawn = list(option_sets(StandardScaler))
    assert drawn == list(option_sets(StandardScaler))
    assert all(value in (True, False) for options in drawn for value in options.values())
    named = {name for options in option_sets(LogisticRegression) for name in options}
    assert {"C", "solver", "fit_intercept"} <= named
    assert not {"n_jobs", "verbose", "random_state"} & named


def test_option_sets_are_equal_or_refused():
    tally, refusals = Tally(), {}
    run(islice(cases(sets=2, every=23, first=4), 10), tally, refusals, every=30)
    assert not tally.faults, "\n".join([tally.line("options"), *tally.faults[:20]])
    assert tally.counts["equal"] >= 15, tally.line("options")
    assert all(refusals.values()), "each refusal has a reason"
