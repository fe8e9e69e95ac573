"""The bounded part of the oracle: all estimators on some inputs, some on scikit-learn's checks, some random pipelines.

``full.py`` runs all of it: ``make oracles``.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests.oracles.tally import Tally
from tests.oracles.windtunnel_estimators import compose, estimators, facade, sources

CHECKED = (
    "AdaBoostRegressor",
    "BernoulliNB",
    "DecisionTreeClassifier",
    "HistGradientBoostingRegressor",
    "KMeans",
    "LGBMClassifier",
    "LogisticRegression",
    "OneHotEncoder",
    "PCA",
    "Ridge",
    "SimpleImputer",
    "StackingClassifier",
    "StandardScaler",
)


def _assert_clean(tally: Tally, least: int) -> None:
    assert not tally.faults, "\n".join([tally.line("windtunnel"), *tally.faults[:20]])
    assert tally.counts["equal"] >= least, tally.line("windtunnel")


@pytest.mark.slow
@pytest.mark.parametrize("with_names", [False, True])
def test_every_estimator_answers_or_refuses_as_its_source_does(with_names):
    tally, refusals = Tally(), {}
    every = 24 if with_names else 12
    estimators.run(sources.all_sources(with_names=with_names), tally, refusals, every=every)
    _assert_clean(tally, least=500)
    assert all(refusals.values()), "each refusal has a reason"


def test_scikit_learns_own_checks_pass_on_translations():
    chosen = [source for source in sources.unfitted() if type(source).__name__ in CHECKED]
    assert len(chosen) >= len(CHECKED)
    tally, refusals = Tally(), {}
    facade.run(chosen, tally, refusals)
    _assert_clean(tally, least=150)


def test_random_pipelines_answer_or_refuse_as_their_sources_do():
    tally = Tally()

    @seed(0)
    @settings(max_examples=25, database=None, suppress_health_check=list(HealthCheck))
    @given(compose.programs())
    def run(program):
        compose.fit_and_compare(*program, tally, seed=0, most=12)

    run()
    _assert_clean(tally, least=100)


def test_the_oracle_notices_an_answer_that_the_source_refuses():
    """A translation without its checks fails."""
    from sklearn.linear_model import LogisticRegression

    class Unchecked:
        def predict(self, x):
            return source.estimator.predict([[0.0] * 4] * len(x))

    source = sources.fitted(LogisticRegression())
    tally = Tally()
    for label, x in estimators.of_numbers(source.x[:2], None, np.random.default_rng(0)):
        if label.startswith("NaN"):
            estimators.compare(source.estimator, Unchecked(), "predict", x, label, tally)
    assert tally.counts["wrong"] >= 3
