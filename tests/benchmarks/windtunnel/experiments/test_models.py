"""Sources and outside models on a small task: they learn it, and are what they say."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from mlsys_bench.windtunnel.experiments.data import Part, Task
from mlsys_bench.windtunnel.experiments.nearby import registry
from mlsys_bench.windtunnel.experiments.networks import Mlp, SharedLinear, TabM, bin_shares
from mlsys_bench.windtunnel.experiments.outside import OUTSIDE, Budget
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
    options = SMALL.get(name, {"lr": 1e-2})
    valid, test = model.fit(code_task(task), options, Budget(epochs=45, num_threads=1, seed=0, num_trees=20))
    assert len(valid) == len(test) == 400
    assert ((test >= 0) & (test <= 1)).all()
    assert roc_auc_score(task.test.target, test) > 0.9


def test_members_start_apart_and_share_weights():
    layer = SharedLinear(3, 4, members=2, has_signs=True)
    x = torch.randn(5, 1, 3).expand(-1, 2, -1)
    with torch.no_grad():
        layer.scale_in[0], layer.scale_in[1], layer.bias[1] = 1.0, 1.0, layer.bias[0]
        same = layer(x)
        assert torch.equal(same[:, 0], same[:, 1])
        layer.scale_in[1] = -1.0
        assert torch.allclose(layer(x)[:, 1] - layer.bias[1], -(same[:, 0] - layer.bias[0]))


def test_bin_shares():
    shares = bin_shares(torch.tensor([-1.0, 0.5, 2.0, 6.0]), torch.tensor([0.0, 1.0, 3.0]))
    assert shares.tolist() == [[-1.0, 0.0], [0.5, 0.0], [1.0, 0.5], [1.0, 2.5]]


def test_networks_answer_a_score_a_member(task: Task):
    coded = code_task(task)
    numbers, codes = torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.int64)
    assert Mlp(coded.train, coded.cardinalities)(numbers, codes).shape == (3, 1)
    assert TabM(coded.train, coded.cardinalities, members=4)(numbers, codes).shape == (3, 4)
