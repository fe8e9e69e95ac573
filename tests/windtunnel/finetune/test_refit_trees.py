"""Leaves and thresholds in closed form: routing is that of the trees, thresholds find the border, weights the truth."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lightgbm import LGBMClassifier
from mlsys_windtunnel import translate
from mlsys_windtunnel.finetune.losses import log_loss
from mlsys_windtunnel.finetune.refit_trees import refit_trees, route
from mlsys_windtunnel.finetune.update_trees import Boosted, blend
from mlsys_windtunnel.modules.tree.ensemble import stacked
from mlsys_windtunnel.modules.tree.trees import Trees

SMALL = {"n_estimators": 6, "num_leaves": 8, "verbose": -1, "n_jobs": 1}


def _table(num_rows: int = 1_500):
    """Numbers with missing values, and a column of categories."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(num_rows, 4))
    x[rng.random(x.shape) < 0.1] = np.nan
    x[:, 3] = rng.integers(0, 6, num_rows)
    y = np.nan_to_num(x[:, 0]) + (x[:, 3] % 2) + rng.normal(size=num_rows) > 0.4
    return x, y.astype(int)


def _boosted(source) -> Boosted:
    found = Boosted.of(translate(source).network)
    assert found is not None
    return found


@pytest.mark.parametrize("model", ["lightgbm", "xgboost"])
def test_rows_are_routed_as_the_trees_route_them(model):
    x, y = _table()
    if model == "lightgbm":
        source = LGBMClassifier(**SMALL).fit(x, y, categorical_feature=[3])
    else:
        xgboost = pytest.importorskip("xgboost", reason="XGBoost is not installed: pip install xgboost")
        source = xgboost.XGBClassifier(n_estimators=6, max_depth=3, n_jobs=1).fit(x, y)
    boosted = _boosted(source)
    ensemble, clean = boosted.trees.ensemble, boosted.clean(torch.from_numpy(x))
    expected = boosted.trees.leaves(torch.from_numpy(x)).numpy()
    for tree in range(ensemble.num_trees):
        np.testing.assert_array_equal(route(ensemble, ensemble.threshold, tree, clean), expected[:, tree])


def test_ensembles_side_by_side_answer_the_sum():
    x, y = _table()
    first = _boosted(LGBMClassifier(**SMALL).fit(x, y, categorical_feature=[3])).trees
    second = _boosted(LGBMClassifier(**{**SMALL, "n_estimators": 3}).fit(x, 1 - y, categorical_feature=[3])).trees
    together = Trees(stacked([first.ensemble, second.ensemble]))
    rows = torch.from_numpy(x)
    torch.testing.assert_close(together(rows), first(rows) + second(rows), rtol=0, atol=1e-12)


def test_thresholds_move_to_the_new_border_and_only_where_asked():
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(4_000, 2))
    source = LGBMClassifier(**{**SMALL, "num_leaves": 2}).fit(x, (x[:, 0] > 0.3).astype(int))
    boosted = _boosted(source)
    truth = (x[:, 0] > 0.7).astype(float)[:, None]

    def slopes(margin):
        share = 1 / (1 + np.exp(-margin))
        return share - truth, share * (1 - share)

    ensemble = boosted.trees.ensemble
    stays, moves = (refit_trees(ensemble, x, slopes, np.zeros(1), moves_thresholds=each) for each in (False, True))
    np.testing.assert_array_equal(stays.threshold, ensemble.threshold)
    assert np.abs(moves.threshold - 0.7).max() < 0.02
    errors = [((each.margins(ensemble, x, 1) > 0) != truth).mean() for each in (stays, moves)]
    assert errors[1] < 0.03 < errors[0]


def test_weights_follow_the_answer_that_is_right():
    rng = np.random.default_rng(0)
    truth, other = rng.normal(size=(2, 5_000))
    target = torch.from_numpy((rng.random(5_000) < 1 / (1 + np.exp(-2 * truth))).astype(np.int64))
    margins = torch.from_numpy(np.stack([other, 2 * truth], axis=1)[:, :, None])
    found = blend(margins, target, torch.ones(5_000, dtype=torch.float64), log_loss)
    assert found.weights[0] < 0.1
    assert 0.9 < found.weights[1] < 1.1
    assert found.gain > 10 * found.gain_se
    few = blend(margins[:5], target[:5], torch.ones(5, dtype=torch.float64), log_loss)
    assert few.weights[0] > found.weights[0] + 0.2, "few rows speak for what is there"
