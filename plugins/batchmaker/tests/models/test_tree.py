"""TreeLSTM through the engine, against recursion."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mlsys_batchmaker.engine import Engine, EngineConfig
from mlsys_batchmaker.models.tree import random_tree, tree_model
from mlsys_core.errors import InvalidInputError


def recursive(model, request) -> np.ndarray:
    leaf, inner = (cell.module for cell in model.cells)
    count = len(request["words"])

    def state(node: int):
        if node < count:
            return leaf(torch.tensor([request["words"][node]]))
        left, right = (state(child) for child in request["children"][node - count].tolist())
        return inner(left[0], right[0], left[1], right[1])

    with torch.no_grad():
        return state(2 * count - 2)[0][0].numpy()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("executor", ["cell", "chunk"])
@pytest.mark.parametrize("compiler", ["eager", "auto"])
def test_random_trees(compiler: str, executor: str, workers: int):
    model = tree_model(num_words=30, hidden_size=16, batch_sizes=(1, 2, 4, 8, 16))
    rng = np.random.default_rng(0)
    requests = [random_tree(rng, num_leaves=int(n), num_words=30) for n in rng.integers(1, 25, 20)]
    requests.append({"words": rng.integers(0, 30, 16), "children": np.arange(30).reshape(-1, 2)})  # a complete tree
    with Engine(model, EngineConfig(executor=executor, num_workers=workers, compiler=compiler)) as engine:
        answers = [future.result() for future in [engine.submit(request) for request in requests]]
    for request, answer in zip(requests, answers, strict=True):
        np.testing.assert_allclose(answer.outputs["hidden"], recursive(model, request), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "children",
    [[[0, 1]], [[0, 1], [0, 2]], [[3, 1], [0, 2]], [[0, 1], [2, 9]], [[0, 1], [2, -1]], [[0, 1], [4, 2]]],
    ids=["few", "twice", "itself", "beyond", "negative", "root"],
)
def test_bad_trees(children: list[list[int]]):
    model = tree_model(num_words=30, hidden_size=8)
    with pytest.raises(InvalidInputError, match=r"children|cycle"):
        model.unfold({"words": np.arange(3), "children": np.array(children)})
