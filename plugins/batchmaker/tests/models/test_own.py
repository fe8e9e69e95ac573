"""Models in a few lines: the examples of the docs, as they stand there, against plain loops in torch."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from mlsys_batchmaker.engine import Engine, EngineConfig
from mlsys_batchmaker.models.model import Model
from mlsys_batchmaker.models.own import own_cell, own_model
from mlsys_batchmaker.models.unfolding import fold
from mlsys_core.errors import InvalidInputError

PAGE = Path(__file__).parents[4] / "docs" / "batchmaker.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text().partition("## Your own cells")[2], re.DOTALL)


def from_the_docs(number: int) -> Model:
    torch.manual_seed(3)
    names: dict[str, object] = {}
    exec(BLOCKS[number], names)
    model = names["model"]
    assert isinstance(model, Model)
    return model


def weights_of(model: Model, cell: str):
    return next(each.module for each in model.cells if each.spec.name == cell)


@pytest.mark.parametrize("executor", ["cell", "chunk"])
def test_attention_over_a_gru_is_the_softmax_of_torch(executor: str):
    model, rng = from_the_docs(0), np.random.default_rng(0)
    sentences = [rng.integers(0, 50, length) for length in (1, 7, 2, 12, 7)]
    read, attend = weights_of(model, "read"), weights_of(model, "attend")
    with Engine(model, EngineConfig(executor=executor, compiler="eager")) as engine, torch.no_grad():
        futures = [engine.submit({"words": words}) for words in sentences]
        for words, future in zip(sentences, futures, strict=True):
            states, h = [], torch.zeros(1, 16)
            for word in words:
                h = read.gru(read.x(torch.tensor([word])), h)
                states.append(h)
            keys = torch.cat(states)
            expected = torch.softmax(attend.score(torch.tanh(attend.key(keys)))[:, 0], 0) @ keys
            np.testing.assert_allclose(future.result().outputs["mean"], expected, atol=2e-6)
        assert engine.counters.effective_batch_size > 1


@pytest.mark.parametrize("executor", ["cell", "chunk"])
def test_a_child_sum_tree_has_any_number_of_children(executor: str):
    model, rng = from_the_docs(1), np.random.default_rng(1)
    join, node = weights_of(model, "join"), weights_of(model, "node")
    trees = []
    for size in (1, 2, 9, 14, 30):
        parents = [int(rng.integers(child + 1, min(size, child + 6))) for child in range(size - 1)]
        trees.append({"words": rng.integers(0, 50, size), "parents": np.array([*parents, -1])})
    trees.append({"words": np.arange(12), "parents": np.array([11] * 11 + [-1])})  # eleven children of one node

    def plain(tree: dict[str, np.ndarray], number: int) -> tuple[torch.Tensor, torch.Tensor]:
        word = torch.tensor([tree["words"][number]])
        hs = fc = torch.zeros(1, 16)
        for child in np.flatnonzero(tree["parents"] == number):
            h, c = plain(tree, int(child))
            hs, fc = hs + h, fc + torch.sigmoid(join.x(word) + join.u(h)) * c
        i, o, u = (node.x(word) + node.u(hs)).chunk(3, dim=1)
        c = torch.sigmoid(i) * torch.tanh(u) + fc
        return torch.sigmoid(o) * torch.tanh(c), c

    with Engine(model, EngineConfig(executor=executor, compiler="eager")) as engine, torch.no_grad():
        for tree, future in zip(trees, [engine.submit(tree) for tree in trees], strict=True):
            outputs, (h, c) = future.result().outputs, plain(tree, len(tree["words"]) - 1)
            np.testing.assert_allclose(outputs["h"], h[0], atol=2e-6)
            np.testing.assert_allclose(outputs["c"], c[0], atol=2e-6)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({"words": [1, 2], "parents": [-1]}, "there are other rows: {'words': 2}"),
        ({"words": [1], "parents": [1, -1]}, "there are other rows: {'words': 1}"),
        ({"words": [1, 2], "parents": [1.7, -1]}, "whole numbers in a row"),
        ({"words": [1, 2], "parents": [[1], [-1]]}, "parents: numbers in 1 dimensions"),
        ({"words": [1, 2], "parents": [1, None]}, "parents: numbers in 1 dimensions"),
        ({"words": [1, [2]], "parents": [1, -1]}, "different lengths"),
        ({"words": [1, 2]}, r"has \['parents', 'words'\], got \['words'\]"),
        ({"words": [1, 2], "parents": [1, -1], "word": [1, 2]}, "got .*'word'"),
        ({"words": [1, 2], "parents": None}, "in 1 dimensions"),
    ],
)
def test_requests_that_are_no_trees_are_refused(request_: dict[str, object], says: str):
    with pytest.raises(InvalidInputError, match=says):
        from_the_docs(1).unfold(request_)


@pytest.mark.parametrize(
    ("function", "row", "says"),
    [
        (lambda _, x: None, 2, "gives NoneType"),
        (lambda _, x: (x, None), 2, "gives Tensor, NoneType"),
        (lambda _, x: {"y": x}, 2, "gives dict"),
        (lambda _, x: x, range(1, 5), "counted from 0, as range"),
        (lambda _, x: x, "2", "give the numbers of its row"),
    ],
)
def test_cells_that_are_none_are_refused(function, row, says: str):
    with pytest.raises(InvalidInputError, match=says):
        own_cell("odd", function, {"x": row}, "y")


def test_the_examples_are_short():
    """A model of one's own takes no more than fifteen lines, imports included."""
    for block in BLOCKS[:2]:
        assert len([line for line in block.splitlines() if line.strip()]) <= 15


def test_what_does_not_fold_is_refused():
    plain = own_cell("plain", lambda _, x: x, {"x": 2}, "y")
    adder = own_cell("adder", lambda _, y, total: total + y, {"y": 2, "total": 2}, "total")
    x = {"x": [[1.0, 2.0]]}
    with pytest.raises(InvalidInputError, match="nothing is carried"):
        own_model("bad", [plain], lambda request, graph: fold(graph, "plain", [0]).last("y"), x, ["y"])

    def summed(request, graph):
        rows = graph.add_many("plain", len(request["x"]), each={"x": request["x"]})
        return fold(graph, "adder", range(rows, rows + len(request["x"]))).last("total")

    model = own_model("sum", [plain, adder], summed, x, ["total"])
    with Engine(model, EngineConfig(compiler="eager")) as engine:
        rows = np.arange(10, dtype=np.float32).reshape(5, 2)
        assert engine.submit({"x": rows}).result().outputs["total"].tolist() == rows.sum(0).tolist()
    for parents in ([1, 0, -1], [2, 2, 0], [0]):
        with pytest.raises(InvalidInputError, match="parents: each node's parent comes after it"):
            from_the_docs(1).unfold({"words": np.zeros(len(parents), np.int64), "parents": np.array(parents)})


def test_the_limit_on_cells_is_an_option():
    model = from_the_docs(0)
    request = {"words": np.zeros(6, np.int64)}
    with Engine(model, EngineConfig(max_cells=12, compiler="eager")) as engine:
        assert engine.submit(request).result().outputs["mean"].shape == (16,)
    with (
        Engine(model, EngineConfig(max_cells=11, compiler="eager")) as engine,
        pytest.raises(InvalidInputError, match="at most 11"),
    ):
        engine.submit(request).result()
    with pytest.raises(InvalidInputError, match="max_cells=0"):
        EngineConfig(max_cells=0)


def test_what_is_no_cell_or_model_is_refused():
    with pytest.raises(InvalidInputError, match="does not run on rows"):
        own_cell("bad", lambda _, x: x @ torch.zeros(3, 3), {"x": 2}, "y")
    with pytest.raises(InvalidInputError, match="gives 1 outputs, and 2 are named"):
        own_cell("bad", lambda _, x: x, {"x": 2}, "y z")
    with pytest.raises(InvalidInputError, match="mixes requests"):
        own_cell("bad", lambda _, x: x - x.mean(0), {"x": 2}, "y")
    good = own_cell("good", lambda _, x: x, {"x": 2}, "y")
    with pytest.raises(InvalidInputError, match="example request does not unfold"):
        own_model("bad", [good], lambda request, graph: graph.add("other", {}), {"x": [1.0]}, ["y"])
    with pytest.raises(InvalidInputError, match="1 results, and 2 are named"):
        own_model("bad", [good], lambda request, graph: graph.add("good", {}), {"x": [1.0]}, ["y", "z"])


@pytest.mark.parametrize("executor", ["cell", "chunk"])
def test_lone_requests_have_a_batch_size_of_one(executor: str):
    """Steps that a round skips, as their chain has stopped, are no tasks."""
    from mlsys_batchmaker.cells.cell import make_cell
    from mlsys_batchmaker.cells.lstm import WordLSTMCell, WordLSTMDecoderCell
    from mlsys_batchmaker.models.sequence import Seq2Seq

    torch.manual_seed(0)
    decoder = WordLSTMDecoderCell(5, 8)
    cells = [make_cell("encoder", WordLSTMCell(5, 8))]
    first = Model("first", [*cells, make_cell("decoder", decoder, results=["word"])], Seq2Seq())
    requests = [{"words": np.array(words)} for words in ([1, 2], [3, 0, 4], [4])]
    with Engine(first, EngineConfig(executor=executor)) as engine:
        eos = int(engine.submit(requests[0]).result().outputs["words"][1])  # so that this chain stops within a round
    stopping = make_cell("decoder", decoder, results=["word"], stop=("word", eos))
    with Engine(Model("stops", [*cells, stopping], Seq2Seq()), EngineConfig(executor=executor)) as engine:
        words = [engine.submit(request).result().outputs["words"] for request in requests]
        assert any(len(each) < len(request["words"]) + 10 for each, request in zip(words, requests, strict=True))
        assert engine.counters.effective_batch_size == 1.0
