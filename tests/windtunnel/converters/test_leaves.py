"""Leaves as features: the encoder, its translation, and its soft form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightgbm import LGBMClassifier, LGBMRegressor
from mlsys_windtunnel.backends.soft.options import SoftOptions
from mlsys_windtunnel.backends.soft.soften import soften
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.estimators import FactorizationMachineClassifier, LeafEncoder
from mlsys_windtunnel.finetune.tune import fine_tune
from sklearn.pipeline import make_pipeline

rng = np.random.default_rng(0)
X = rng.normal(size=(400, 5))
Y = (X[:, 0] * X[:, 1] + X[:, 2] > 0).astype(int)
TREES = LGBMClassifier(n_estimators=6, num_leaves=5, min_child_samples=5, verbose=-1, n_jobs=1)


def test_one_leaf_of_each_tree():
    encoder = LeafEncoder(TREES).fit(X, Y)
    leaves = encoder.transform(X).toarray()
    assert leaves.shape == (400, encoder.num_leaves_.sum()) == (400, len(encoder.get_feature_names_out()))
    starts = np.cumsum(encoder.num_leaves_) - encoder.num_leaves_
    assert (np.add.reduceat(leaves, starts, axis=1) == 1).all()
    reached = encoder.estimator_.predict(X, pred_leaf=True)
    assert (leaves[:, : encoder.num_leaves_[0]].argmax(axis=1) == reached[:, 0]).all()


def test_translates_exactly(same_answers: Callable[..., Any]):
    same_answers(LeafEncoder(TREES).fit(X, Y), X, trained=False)
    machine = FactorizationMachineClassifier(4, max_iter=2, random_state=0)
    same_answers(make_pipeline(LeafEncoder(TREES), machine).fit(X, Y), X)


def test_missing_values_reach_the_same_leaves(same_answers: Callable[..., Any]):
    x = np.where(rng.random(X.shape) < 0.2, np.nan, X)
    same_answers(LeafEncoder(LGBMRegressor(n_estimators=3, verbose=-1, n_jobs=1)).fit(x, X[:, 0]), x, trained=False)


@pytest.mark.parametrize("gate", ["softmax", "tanh"])
def test_cold_splits_give_the_exact_leaves(gate: str):
    sizes = LGBMClassifier(n_estimators=8, num_leaves=12, min_child_samples=30, verbose=-1, n_jobs=1)
    module = translate(make_pipeline(LeafEncoder(sizes), FactorizationMachineClassifier(2, max_iter=1)).fit(X, Y))
    packed = torch.from_numpy(module.encode(X))
    options = SoftOptions(level="L4", gate=gate, temperature=1e-6, leaf_temperature=0.01)  # type: ignore[arg-type]
    smooth = soften(module.network, packed, options)
    with torch.no_grad():
        exact, soft = (
            next(part for part in network.modules() if hasattr(part, "leaf_weights")).leaf_weights(packed)
            for network in (module.network, smooth)
        )
    assert exact.shape == soft.shape
    assert (exact.argmax(dim=1) == soft.argmax(dim=1)).all()
    assert (exact - soft).abs().mean() < 1e-3  # rows at a threshold itself are half on each side


def test_fine_tuning_starts_at_the_source_and_moves_splits():
    source = make_pipeline(LeafEncoder(TREES), FactorizationMachineClassifier(4, max_iter=2, random_state=0)).fit(X, Y)
    module = translate(source)
    tuned = fine_tune(module, X, Y, level="L4", epochs=3, batch_size=64, lr=0.02)
    apart = np.abs(tuned.module.predict_proba(X) - source.predict_proba(X)).max()
    assert apart > 1e-3
    assert tuned.history[-1]["train_loss"] < tuned.history[1]["train_loss"]
