"""Soft trees against the exact ones: sharp they are equal, and the kernel and torch agree, gradients too."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from lightgbm import LGBMClassifier
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.backends.soft import native
from mlsys_windtunnel.backends.soft import trees as soft_trees
from mlsys_windtunnel.backends.soft.options import SoftOptions
from mlsys_windtunnel.backends.soft.soften import soften
from mlsys_windtunnel.backends.soft.trees import SoftTrees
from mlsys_windtunnel.convert.translation import translate
from sklearn.ensemble import AdaBoostRegressor, HistGradientBoostingClassifier, RandomForestClassifier

LEVELS = ("L1", "L2", "L3", "L4")


def table(num_classes: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Numbers, a 0/1 column, categories that matter, missing values."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 5))
    x[:, 2] = x[:, 2] > 0
    x[:, 3] = rng.integers(0, 9, 400)
    y = (x[:, 0] + (x[:, 3] % 3 == 1) + 0.3 * x[:, 1] > 0.5).astype(int)
    if num_classes == 3:
        y += x[:, 2] > 0
    x[::7, 1] = np.nan
    x[::11, 3] = np.nan
    return x, y


def sources() -> dict[str, Any]:
    x, y = table()
    light = {"n_estimators": 6, "num_leaves": 13, "min_child_samples": 5, "verbose": -1, "n_jobs": 1}
    return {
        "lightgbm": LGBMClassifier(**light).fit(x, y, categorical_feature=[3]),
        "lightgbm, 3 classes": LGBMClassifier(**light).fit(*table(3)),
        "lightgbm, zero is missing": LGBMClassifier(**light, zero_as_missing=True).fit(x, y),
        "forest": RandomForestClassifier(4, random_state=0).fit(x, y),
        "histogram": HistGradientBoostingClassifier(max_iter=4, max_leaf_nodes=9, categorical_features=[3]).fit(x, y),
        "median": AdaBoostRegressor(n_estimators=3, random_state=0).fit(np.nan_to_num(x), y * 1.0),
    }


SOURCES = sources()


def softened(name: str, **options: Any) -> tuple[Any, Any, torch.Tensor]:
    module = translate(SOURCES[name])
    x = torch.from_numpy(module.encode(np.nan_to_num(table()[0]) if name == "median" else table()[0]))
    return module.network, soften(module.network, x, SoftOptions(**options)), x


def trees_of(network: Any) -> SoftTrees:
    return next(part for part in network.modules() if isinstance(part, SoftTrees))


@pytest.mark.parametrize("name", list(SOURCES))
@pytest.mark.parametrize("gate", ["softmax", "tanh"])
def test_sharp_soft_trees_answer_as_exact_ones(name: str, gate: str) -> None:
    for level in LEVELS:
        exact, soft, x = softened(name, level=level, gate=gate, temperature=1e-6)
        for part in soft.modules():
            if isinstance(part, SoftTrees):
                part.sharpness = 1e3
        with torch.no_grad():
            torch.testing.assert_close(soft(x), exact(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["lightgbm", "forest"])
def test_weights_of_leaves_sharpen_to_the_exact_leaves(name: str) -> None:
    exact, soft, x = softened(name, temperature=1e-6)
    trees = trees_of(soft)
    trees.sharpness = 1e3
    leaves = exact.output.body.leaves(x)
    with torch.no_grad():
        weights = trees.leaf_weights(x)
    assert weights.shape == (len(x), len(exact.output.body.leaf_value))
    torch.testing.assert_close(weights.gather(1, leaves), torch.ones(leaves.shape, dtype=x.dtype), atol=1e-5, rtol=0)


@pytest.mark.usefixtures("kernel_level")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("gate", ["softmax", "tanh"])
@pytest.mark.parametrize("name", ["lightgbm", "lightgbm, 3 classes", "forest"])
def test_the_kernel_computes_as_torch_does_and_so_do_its_gradients(name: str, gate: str, level: str) -> None:
    if native.kernel() is None:
        pytest.skip("no C++ compiler")
    for rank in (0, 2):
        _, soft, x = softened(name, level=level, gate=gate, rank=rank)
        results = []
        for is_native in (native.is_native, lambda *_, **__: False):
            rows = x.clone().requires_grad_()
            soft.zero_grad()
            with mock.patch.object(soft_trees, "is_native", is_native):
                scores = soft(rows)
            (scores * torch.linspace(-1, 1, len(x)).unsqueeze(1)).sum().backward()
            gradients = {key: each.grad.clone() for key, each in soft.named_parameters() if each.grad is not None}
            results.append((scores.detach(), {**gradients, "rows": rows.grad.nan_to_num()}))
        (scores, gradients), (expected, expected_gradients) = results
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
        assert gradients.keys() == expected_gradients.keys()
        for key, gradient in gradients.items():
            size = float(expected_gradients[key].abs().max())
            torch.testing.assert_close(gradient, expected_gradients[key], rtol=1e-3, atol=1e-4 * size + 3e-6, msg=key)


def test_each_level_trains_what_the_paper_says() -> None:
    trained = {}
    for level in LEVELS:
        trees = trees_of(softened("lightgbm, 3 classes", level=level)[1])
        trained[level] = {name.rpartition(".")[2] for name, each in trees.named_parameters() if each.requires_grad}
        assert level in trees.extra_repr()
    assert trained["L1"] == {"leaf", "bias"}
    assert trained["L2"] == trained["L1"] | {"threshold"}
    assert trained["L3"] == trained["L2"] | {"weight"}
    assert trained["L4"] == trained["L3"] | {"path", "count"}


def test_wide_tables_get_a_correction_of_low_rank() -> None:
    x = np.random.default_rng(0).normal(size=(200, 600))
    module = translate(LGBMClassifier(n_estimators=2, num_leaves=4, verbose=-1, n_jobs=1).fit(x, x[:, 0] > 0))
    trees = trees_of(soften(module.network, torch.from_numpy(x), SoftOptions(level="L3")))
    assert trees.weight is None
    assert trees.rank == 32


def test_scope_trees_trains_trees_alone_and_a_random_start_is_another() -> None:
    _, soft, _ = softened("lightgbm", scope="trees", init="random", level="L4")
    _, source, _ = softened("lightgbm", scope="trees", init="source", level="L4")
    assert all(each.requires_grad for each in trees_of(soft).parameters())
    assert not torch.equal(trees_of(soft).threshold, trees_of(source).threshold)


def test_dropout_changes_training_only() -> None:
    _, soft, x = softened("lightgbm", dropout=0.5)
    soft.train()
    assert not torch.equal(soft(x), soft(x))
    soft.eval()
    assert torch.equal(soft(x), soft(x))


def test_trees_too_large_are_refused() -> None:
    with mock.patch.object(soft_trees, "MOST_LITERALS", 100), pytest.raises(InvalidInputError, match="max_leaf_nodes"):
        softened("forest")
