"""Sources and outside models on a small task: they learn it, and are what they say."""

from __future__ import annotations

import importlib.util

import numpy as np
import pandas as pd
import pytest
import torch
from mlsys_bench.windtunnel.experiments.data import Part, Task
from mlsys_bench.windtunnel.experiments.networks import Mlp, SharedLinear, TabM, bin_shares, tree_table
from mlsys_bench.windtunnel.experiments.outside import OUTSIDE, Budget
from mlsys_bench.windtunnel.experiments.sources import (
    code_task,
    encode_task,
    least_count,
    least_counts,
    make_columns,
    make_source,
)
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from sklearn.metrics import roc_auc_score

SMALL = {  # options for few rows
    "lightgbm": {"n_estimators": 60, "cat_smooth": 1, "min_data_per_group": 5},
    "xgboost": {"n_estimators": 60},
    "catboost": {"iterations": 60},
}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("pipe", ["pipe1", "pipe2", "pipe3"])
@pytest.mark.parametrize("pre", ["pre1", "pre2", "pre3"])
def test_sources_learn_and_translate_exactly(task: Task, pre: str, pipe: str):
    source = make_source(task, pre, pipe, seed=0, num_threads=1, num_trees=5).fit(task.train.frame, task.train.target)
    expected = source.predict_proba(task.test.frame)
    assert roc_auc_score(task.test.target, expected[:, 1]) > 0.75
    assert np.abs(translate(source).predict_proba(task.test.frame) - expected).max() < 1e-9


def test_preparations_differ_in_width(task: Task):
    widths = {
        pre: make_source(task, pre, "pipe1", seed=0, num_threads=1)[:-1]
        .fit_transform(task.train.frame, task.train.target)
        .shape[1]
        for pre in ("pre1", "pre2", "pre3")
    }
    # 30 towns: 5 binary digits, 5 rows of 6; Pre3 adds 32 bins of two numbers in 6 rows of 6 each and a mean
    assert widths == {"pre1": 2 + 5, "pre2": 2 + 5 + 6, "pre3": 2 + 5 + 6 + 2 * (6 + 6) + 1}


def test_unknown_source_is_refused(task: Task):
    with pytest.raises(InvalidInputError, match="pre9/pipe1"):
        make_source(task, "pre9", "pipe1", seed=0, num_threads=1)


def test_factorisations_of_ratings():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.integers(0, 20, (800, 2)).astype(str).astype(object), columns=["user", "film"])
    part = Part(frame, rng.integers(1, 6, 800).astype(np.float64))
    ratings = Task("ratings", "rmse", (), ("user", "film"), part, part, part)
    for pipe in ("mf", "fm"):
        source = make_source(ratings, "-", pipe, seed=0, num_threads=1).fit(frame, part.target)
        assert np.abs(translate(source).predict(frame) - source.predict(frame)).max() < 1e-9


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([90, 8, 2], 0.05, 3),  # c, of 2 rows, is rare
        ([90, 8, 2], 0.01, 1),  # none is
        ([90, 5, 5], 0.05, 5),  # one of two alike would be: both stay
        ([50, 50], 1.0, 51),  # all are
    ],
)
def test_least_count(counts: list[int], share: float, expected: int):
    column = pd.Series([name for name, count in zip("abc", counts, strict=False) for _ in range(count)])
    bound = least_count(column, share=share, least=1)
    assert bound == expected
    assert sum(count for count in counts if count < bound) <= share * sum(counts)


def test_codes_follow_the_training_rows(task: Task):
    strange = task.test.frame.assign(town="nowhere")
    coded = code_task(
        Task(task.name, "auc", task.numbers, task.words, task.train, task.valid, Part(strange, task.test.target))
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


def test_deepgbm_learns_from_a_preparations_columns(task: Task):
    coded = encode_task(task, "pre2")
    assert coded.train.numbers.shape == (1500, 2 + 5 + 6)  # as the sources have them
    assert coded.cardinalities == (31,)
    expected = make_columns(task, "pre2").fit(task.train.frame).transform(task.test.frame)
    assert np.array_equal(coded.test.numbers, expected)
    budget = Budget(epochs=15, num_threads=1, seed=0, num_trees=10)
    _, test = OUTSIDE["deepgbm"].fit(coded, {"lr": 1e-2}, budget)
    assert roc_auc_score(task.test.target, test) > 0.9
    # the trees, and what learns from them, read the prepared columns alone
    assert tree_table(coded.test, coded) is coded.test.numbers


def test_rare_categories_are_left_out_as_the_preparation_does(task: Task):
    counts = task.train.frame["town"].value_counts()
    least = least_counts(task, "pre3")["town"]
    assert encode_task(task, "pre3").cardinalities == (1 + int((counts >= least).sum()),)
    assert least_counts(task, "pre1") == {"town": 25}


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
