from __future__ import annotations

import numpy as np
import pytest
from mlsys_bench.windtunnel.coverage import suite
from mlsys_bench.windtunnel.coverage.cases import Case, pipelines
from mlsys_bench.windtunnel.coverage.contestants import RefusedError
from sklearn.linear_model import LinearRegression

X = np.arange(12.0).reshape(6, 2)
SOURCE = LinearRegression().fit(X, X[:, 0])


def test_distances():
    assert suite.distance([1.0, np.nan], [1.0, np.nan]) == 0
    assert suite.distance([1.0, 2.0], [[1.0], [2.0]]) == 0, "a column stands for a row's number"
    assert suite.distance([1.0, np.nan], [1.0, 2.0]) == 1
    assert suite.distance(["a", "b"], ["a", "c"]) == 1
    assert suite.distance([100.0], [101.0]) == pytest.approx(0.01)
    assert suite.distance([1.0, 2.0], [1.0, 2.0, 3.0]) == 1


def _refuses(source, rows):
    raise RefusedError("no such option")


def _fails(source, rows):
    raise TypeError("oops")


@pytest.mark.parametrize(
    ("translate", "outcome", "reason"),
    [
        (lambda source, rows: ({"predict": source.predict}, ""), "exact", ""),
        (lambda source, rows: ({"predict": source.predict}, "Imputer"), "host", "Imputer"),
        (lambda source, rows: ({"predict": lambda x: source.predict(x) + 1e-4}, ""), "close", "differs by"),
        (lambda source, rows: ({"predict": lambda x: source.predict(x) + 1}, ""), "wrong", "differs by"),
        (lambda source, rows: ({"predict": lambda x: x.nothing}, ""), "crashed", "predict: AttributeError"),
        (lambda source, rows: ({}, ""), "crashed", "answers none"),
        (_refuses, "refused", "no such option"),
        (_fails, "crashed", "TypeError: oops"),
    ],
)
def test_outcomes(monkeypatch, translate, outcome, reason):
    monkeypatch.setitem(suite.CONTESTANTS, "other", ("numpy", translate))
    found, why = suite.judged(Case("f", "n", SOURCE, X), "other")
    assert found == outcome
    assert reason in why


def test_every_pipeline_of_the_suite_is_exact():
    for case in pipelines():
        assert suite.judged(case, "WindTunnel") == ("exact", ""), case.name
