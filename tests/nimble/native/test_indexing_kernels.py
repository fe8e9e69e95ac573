"""Rows taken and added to by indices, against torch; models that index, beside eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mlsys_nimble import Nimble
from mlsys_nimble.backends.cpu.library import View
from mlsys_nimble.backends.operators import indexing
from mlsys_nimble.ir.operators import Aten, Gather, Pointwise, ScatterAdd
from torch import Tensor

from tests.nimble.native.conftest import in_pieces


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("width", [1, 5, 300])
def test_rows_are_taken(dtype: torch.dtype, width: int, native: Any):
    x = torch.randn(40, 2 * width).to(dtype)[:, :width]  # rows with gaps between them
    indices = torch.randint(-40, 40, (7, 30)).t()
    out = torch.zeros(30, 7, width, dtype=dtype)
    kernel = indexing.gather(Gather(wraps=True), View.of(x), View.of(indices), View.of(out))
    assert torch.equal(in_pieces(kernel, out), x[indices])
    assert kernel.fault is not None
    assert not kernel.fault.value
    strict = indexing.gather(Gather(wraps=False), View.of(x), View.of(indices), View.of(out))
    strict.run()
    assert strict.fault is not None
    assert strict.fault.value


@pytest.mark.parametrize("width", [1, 70, 130])
def test_rows_are_added_in_order(width: int, native: Any):
    x, source, indices = torch.randn(9, width), torch.randn(500, width), torch.randint(0, 9, (500,), dtype=torch.int32)
    out = torch.zeros(9, width)
    views = [View.of(tensor) for tensor in (x, indices, source, out)]
    kernel = indexing.scatter_add(ScatterAdd(), *views)
    assert torch.equal(in_pieces(kernel, out), torch.index_add(x, 0, indices, source))
    indices[3] = 9
    kernel.run()
    assert kernel.fault is not None
    assert kernel.fault.value


@pytest.mark.parametrize("width", [1, 7, 40])
@pytest.mark.parametrize("has_scale", [False, True])
def test_rows_are_taken_scaled_and_added(width: int, has_scale: bool, native: Any):
    x, source, scale = torch.randn(9, width), torch.randn(30, width), torch.randn(50, 2)[:, :1]
    indices, taken = torch.randint(0, 9, (50,)), torch.randint(-30, 30, (50,))
    out = torch.zeros(9, width)
    views = [View.of(tensor) for tensor in (x, indices, source, out, taken, *([scale] if has_scale else []))]
    kernel = indexing.scatter_add(ScatterAdd(Gather(wraps=True), has_scale), *views)
    expected = x.double().index_add(0, indices, (source[taken] * (scale if has_scale else 1)).double())
    torch.testing.assert_close(in_pieces(kernel, out).double(), expected, rtol=1e-5, atol=1e-5)
    taken[3] = 30
    kernel.run()
    assert kernel.fault is not None
    assert kernel.fault.value


class Calling(torch.nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, indices: Tensor) -> Any:
        return self.function(x, indices)


def everything(x: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
    taken = x[:, indices]  # [8, 3, 5, 6]
    rows = torch.index_select(x, 2, indices[0] + 1)
    added = x.index_add(1, indices[0].abs(), taken[:, 0])
    return taken, rows, added, torch.nn.functional.embedding(indices.abs(), x[0]), x.long()[indices[1] * 2]


def test_a_model_that_indexes_gives_what_eager_gives_and_leaves_nothing_to_torch():
    x, indices = torch.randn(8, 4, 6), torch.randint(0, 3, (3, 5))
    model = Nimble(Calling(everything)).prepare((x, indices))
    assert model.prepared is not None
    assert not any(isinstance(each.kind, Aten) for each in model.prepared.executor.source.operators)
    for _ in range(2):
        for found, wanted in zip(model(x, indices), everything(x, indices), strict=True):
            torch.testing.assert_close(found, wanted)
        x, indices = torch.randn(8, 4, 6), -torch.randint(0, 2, (3, 5))


def messages(x: Tensor, edges: Tensor) -> Tensor:
    """A layer as PyTorch Geometric computes it without extensions: messages, and an expanded index to add them at."""
    source, target = edges[0], edges[1]
    sent = x.index_select(0, source) * x[:, 0].sigmoid()[source].view(-1, 1)
    return torch.zeros_like(x).scatter_add_(0, target.view(-1, 1).expand_as(sent), sent)


def test_messages_of_a_graph_are_one_operator():
    x, edges = torch.randn(20, 6), torch.randint(0, 20, (2, 70))
    model = Nimble(Calling(messages)).prepare((x, edges))
    assert model.prepared is not None
    kinds = [each.kind for each in model.prepared.program.operators]
    assert ScatterAdd(Gather(wraps=False), has_scale=True) in kinds
    assert sum(isinstance(kind, Gather) for kind in kinds) == 1, "that of the factors"
    assert not any(isinstance(kind, Aten | Pointwise) and "mul" in str(kind) for kind in kinds)
    for _ in range(2):
        torch.testing.assert_close(model(x, edges), messages(x, edges))
        x, edges = torch.randn(20, 6), torch.randint(0, 20, (2, 70))
    edges[0, 3] = 20
    with pytest.raises(IndexError):
        model(x, edges)


BEYOND: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda x, i: x[i],
    "index_select": lambda x, i: torch.index_select(x, 0, i),
    "index_add": lambda x, i: x.index_add(0, i, x),
}


@pytest.mark.parametrize("name", BEYOND)
def test_an_index_beyond_the_rows_is_refused_as_in_eager(name: str):
    x, indices = torch.randn(3, 4), torch.tensor([0, 1, 2])
    model = Nimble(Calling(BEYOND[name])).prepare((x, indices))
    with pytest.raises((IndexError, RuntimeError)):
        BEYOND[name](x, indices + 1)
    with pytest.raises(IndexError, match="index is out of range"):
        model(x, indices + 1)
    assert torch.equal(model(x, indices), BEYOND[name](x, indices))
