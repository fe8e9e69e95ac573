"""Sources and outside models on a small task: they learn it, and are what they say."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from mlsys_bench.windtunnel.experiments.data import Part, Task
from mlsys_bench.windtunnel.experiments.nearby import registry
from mlsys_bench.windtunnel.experiments.outside import OUTSIDE
from mlsys_bench.windtunnel.experiments.sources import code_task, make_source
from mlsys_windtunnel.convert.translation import translate
from sklearn.metrics import roc_auc_score

SMALL = {  # options for few rows
    "lightgbm": {"n_estimators": 60, "cat_smooth": 1, "min_data_per_group": 5},
    "xgboost": {"n_estimators": 60},
    "catboost": {"iterations": 60},
}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_the_source_learns_and_translates_exactly(towns: Task):
    source = make_source(towns, seed=0, num_threads=1, num_trees=5).fit(towns.train.frame, towns.train.target)
    expected = source.predict_proba(towns.test.frame)
    assert roc_auc_score(towns.test.target, expected[:, 1]) > 0.75
    assert np.abs(translate(source, registry=registry()).predict_proba(towns.test.frame) - expected).max() < 1e-9
    # 30 towns: 5 rows of 6; counts of 2 slots before and 1 after
    assert source[:-1].transform(towns.test.frame).shape[1] == 2 + 5 + 6 + 4


def test_codes_follow_the_training_rows(task: Task):
    strange = task.test.frame.assign(town="nowhere")
    coded = code_task(
        Task(task.name, task.numbers, task.words, task.train, task.valid, Part(strange, task.test.target))
    )
    assert coded.cardinalities == (31,)
    assert set(np.unique(coded.train.codes)) == set(range(1, 31))
    assert (coded.test.codes == 0).all()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", OUTSIDE)
def test_outside_models_learn(task: Task, name: str):
    model = OUTSIDE[name]
    if model.package is not None and importlib.util.find_spec(model.package) is None:
        pytest.skip(f"{model.package} is not installed")
    valid, test = model.fit(code_task(task), SMALL[name], seed=0, num_threads=1)
    assert len(valid) == len(test) == 400
    assert ((test >= 0) & (test <= 1)).all()
    assert roc_auc_score(task.test.target, test) > 0.9
