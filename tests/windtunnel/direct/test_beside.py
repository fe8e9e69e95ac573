"""Networks beside trees answer without the network's executor, with the bits that it gives."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from lightgbm import LGBMClassifier, LGBMRegressor
from mlsys_windtunnel.backends.direct.program import direct_program
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.module import METHODS, WindTunnelModule
from mlsys_windtunnel.modules.combine.combine import Beside
from mlsys_windtunnel.modules.linear.neural import Layers
from mlsys_windtunnel.modules.tree.heads import Mapped
from sklearn.compose import make_column_transformer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

rng = np.random.default_rng(0)
NUMBERS = rng.normal(size=(90, 3))
NUMBERS[::7, 1] = np.nan
NUMBERS[:, 2] = rng.integers(0, 3, 90)
SMALL: dict[str, Any] = {"n_estimators": 4, "num_leaves": 5, "min_child_samples": 5, "verbose": -1}
TARGETS = {
    "two classes": (NUMBERS[:, 0] > 0).astype(int),
    "three classes": np.digitize(NUMBERS[:, 0], [-0.5, 0.5]),
    "numbers": NUMBERS[:, 0] ** 2,
}


def layers(*widths: int) -> Layers:
    weights = [rng.normal(size=shape) for shape in pairwise(widths)]
    return Layers(weights, [rng.normal(size=width) for width in widths[1:]], hidden="relu")


def joined(y: Any) -> WindTunnelModule:
    """Return the translation of boosted trees behind a ``ColumnTransformer``, with two networks beside the trees."""
    steps = make_column_transformer((StandardScaler(), [0, 1]), (OneHotEncoder(sparse_output=False), [2]))
    model = (LGBMRegressor if y.dtype == np.float64 else LGBMClassifier)(**SMALL)
    module = translate(make_pipeline(steps, model).fit(NUMBERS, y))
    head = module.network.output
    outputs = head(torch.zeros(1, 5, dtype=torch.float64)).shape[1]
    bounds = {"fill": np.full(5, 0.25), "low": np.full(5, -1.5), "high": np.full(5, 1.0)}
    holder = head.body if isinstance(head.body, Mapped) else head  # a regression's scores are mapped
    holder.body = Beside(holder.body, [layers(5, outputs), layers(5, 8, 8, outputs)], **bounds)
    return module


@pytest.mark.parametrize("name", TARGETS)
def test_bits_are_those_of_the_network_in_torch(name: str, monkeypatch: pytest.MonkeyPatch):
    module = joined(TARGETS[name])
    for rows in (1, 2, 90):
        x = NUMBERS[:rows]
        for method in [method for method in METHODS if hasattr(module, method)]:
            expected = module._in_torch(module.frontend.tables(x), method)
            with monkeypatch.context() as patch:
                patch.setattr(WindTunnelModule, "_in_torch", None)
                got = getattr(module, method)(x)
            if method == "predict" and name != "numbers":
                expected = np.asarray(module.predictor.classes)[expected]
            np.testing.assert_array_equal(got, expected, strict=True)


def test_changed_networks_and_bounds_are_noticed():
    module = joined(TARGETS["numbers"])
    before = module.predict(NUMBERS)
    beside = module.network.output.body.body
    for change in (beside.networks[1].layers[2].bias, beside.high, beside.trees.leaf_value):
        with torch.no_grad():
            change += 0.5
        after = module.predict(NUMBERS)
        assert (after != before).any()
        np.testing.assert_array_equal(after, module._in_torch(module.frontend.tables(NUMBERS), "predict"))
        before = after


def test_networks_of_another_class_stay_in_torch():
    class Doubled(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    module = joined(TARGETS["numbers"])
    module.network.output.body.body.networks[0].__class__ = Doubled
    assert direct_program(module.network) is None
    np.testing.assert_array_equal(module.predict(NUMBERS), module._in_torch(module.frontend.tables(NUMBERS), "predict"))


@pytest.mark.parametrize(
    "options", [{}, {"reg_sqrt": True}, {"objective": "poisson"}, {"objective": "cross_entropy"}], ids=str
)
def test_mapped_scores_have_the_bits_of_torch(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    target = np.nan_to_num(NUMBERS[:, 0]) % 1
    module = translate(LGBMRegressor(**SMALL | options).fit(NUMBERS, target))
    expected = module._in_torch(module.frontend.tables(NUMBERS), "predict")
    monkeypatch.setattr(WindTunnelModule, "_in_torch", None)
    np.testing.assert_array_equal(module.predict(NUMBERS), expected)
    assert module.predict(NUMBERS[:1]) == expected[0]
