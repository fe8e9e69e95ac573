"""Subclasses go by their base's name where they change the fit alone."""

from __future__ import annotations

import lightgbm
import numpy as np
import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.parse.names import known_name
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

X = np.random.default_rng(0).normal(size=(80, 4))
Y = (X[:, 0] > 0).astype(int)


class OwnScaler(StandardScaler):
    """Nothing is changed."""


class OwnForest(RandomForestClassifier):
    """The fit is."""

    def fit(self, X, y):  # noqa: N803
        self.note = "kept"
        return super().fit(X, 1 - y)


class OwnBooster(lightgbm.LGBMClassifier):
    """Defaults are."""

    def __init__(self, n_estimators=7, verbose=-1, **others):
        super().__init__(n_estimators=n_estimators, verbose=verbose, **others)


class Flattened(RandomForestClassifier):
    """An answer is."""

    def predict_proba(self, X):  # noqa: N803
        return super().predict_proba(X) ** 0.5


class Shifted(Ridge):
    """What an answer calls is."""

    def _decision_function(self, X):  # noqa: N803
        return super()._decision_function(X) + 1


class Transforming(Ridge):
    """An answer is added."""

    def transform(self, X):  # noqa: N803
        return self.predict(X)[:, None]


def test_names():
    assert known_name(OwnScaler) == "sklearn.preprocessing.StandardScaler"
    assert known_name(OwnForest) == "sklearn.ensemble.RandomForestClassifier"
    assert known_name(OwnBooster) == "lightgbm.sklearn.LGBMClassifier"
    assert known_name(Ridge) == "sklearn.linear_model.Ridge"
    for changed in (Flattened, Shifted, Transforming):
        assert known_name(changed).endswith(f"test_names.{changed.__name__}")


def test_subclasses_that_change_the_fit_answer_as_their_base(same_answers):
    same_answers(make_pipeline(OwnScaler(), OwnForest(5, random_state=0)).fit(X, Y), X)
    same_answers(OwnBooster(n_jobs=1).fit(X, Y), X)


@pytest.mark.parametrize("changed", [Flattened(3), Shifted()], ids=repr)
def test_subclasses_that_change_an_answer_are_refused_by_name(changed):
    with pytest.raises(InvalidInputError, match=f"no converter for .*{type(changed).__name__}"):
        translate(changed.fit(X, Y))
