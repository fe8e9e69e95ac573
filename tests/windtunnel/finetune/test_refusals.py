"""Fine-tuning refuses the rows that the source refuses, to train on, to choose by, and to answer for."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from lightgbm import LGBMRanker
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import WindTunnelClassifier, WindTunnelRegressor, fine_tune, translate, update
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

RNG = np.random.default_rng(0)
FRAME = pd.DataFrame(RNG.normal(size=(80, 2)), columns=["a", "b"])
Y = (FRAME.a > 0).to_numpy().astype(int)


def _bad(cell: float) -> pd.DataFrame:
    return FRAME.assign(b=np.where(np.arange(80) == 70, cell, FRAME.b))


@pytest.mark.parametrize("cell", [np.nan, np.inf])
@pytest.mark.parametrize("table", ["training", "evaluation"])
def test_rows_that_the_source_refuses_are_not_trained_on(cell: float, table: str) -> None:
    source = make_pipeline(StandardScaler(), LogisticRegression()).fit(FRAME, Y)
    rows = {"training": (_bad(cell), FRAME), "evaluation": (FRAME, _bad(cell))}[table]
    with pytest.raises(InvalidInputError, match=r"Input X contains (NaN|infinity)"):
        fine_tune(translate(source), rows[0], Y, eval_set=(rows[1], Y), epochs=1)


def test_missing_values_that_the_source_takes_are_trained_on() -> None:
    source = HistGradientBoostingClassifier(max_iter=2).fit(FRAME, Y)
    tuned = fine_tune(translate(source), _bad(np.nan), Y, eval_set=(FRAME, Y), epochs=1)
    assert tuned.module.predict(_bad(np.nan)).shape == (80,)


def test_the_estimator_refuses_in_fit_and_predict() -> None:
    model = WindTunnelClassifier(make_pipeline(StandardScaler(), LogisticRegression()), epochs=1, random_state=0)
    with pytest.raises(ValueError, match="NaN"):
        model.fit(_bad(np.nan), Y)
    with pytest.raises(InvalidInputError, match="NaN"):
        model.fit(FRAME, Y, eval_set=(_bad(np.nan), Y))
    model.fit(FRAME, Y)
    for x, words in ((_bad(np.nan), "NaN"), (_bad(np.inf), "infinity"), (FRAME[["b", "a"]], "same order")):
        for method in (model.predict, model.predict_proba):
            with pytest.raises(ValueError, match=words):
                method(x)


def test_nothing_but_a_loss_by_name_trains_a_ranker() -> None:
    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 4
    source = LGBMRanker(n_estimators=3, num_leaves=4, verbose=-1, min_child_samples=5).fit(x, y, group=[20] * 3)
    module = translate(source)
    for each in (module, translate(source.booster_)):
        for refused in (lambda each=each: fine_tune(each, x, y, epochs=1), lambda each=each: update(each, x, y)):
            with pytest.raises(InvalidInputError, match="ranks rows within queries"):
                refused()
    assert fine_tune(module, x, y, epochs=1, loss="squared_error").best_epoch == 1
    with pytest.raises(InvalidInputError, match="LGBMRanker ranks rows within queries"):
        WindTunnelRegressor(LGBMRanker()).fit(x, y)
