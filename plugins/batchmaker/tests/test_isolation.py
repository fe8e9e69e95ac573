"""A client's answer is its own: cells that mix rows are refused, and a poisoned request fails alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from mlsys_batchmaker.cells.cell import cell, make_cell
from mlsys_batchmaker.engine import Engine, EngineConfig
from mlsys_batchmaker.models.model import Model, Payload, Tensor
from mlsys_batchmaker.plan import CellGraph
from mlsys_batchmaker.plan.spec import Port
from mlsys_batchmaker.workers.materialise import MaterialisedCell
from mlsys_core.errors import InvalidInputError, ServingError
from torch import nn

SIZES = (1, 2, 4, 8, 16, 32, 64)


@cell
class Sums(nn.Module):
    """h -> h + x; ``fn`` is what else happens to the batch."""

    def __init__(self, fn: Any = None) -> None:
        super().__init__()
        self.fn = fn

    def ports(self) -> tuple[list[Port], list[Port]]:
        return [Port("x", "float32", (3,)), Port("h", "float32", (3,))], [Port("h", "float32", (3,))]

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        h = h + x
        return h if self.fn is None else self.fn(h)


class Chain:
    """x [n, 3] -> the sum of its rows, and all sums on the way."""

    name = "chain"
    inputs: tuple[Tensor, ...] = (Tensor("x", "float32", (-1, 3)),)
    outputs: tuple[Tensor, ...] = (Tensor("h", "float32", (3,)),)

    def unfold(self, request: Payload, graph: CellGraph) -> None:
        x = np.asarray(request["x"])
        chain = graph.chain("sum", len(x), each={"x": x}, carry={"h": "h"})
        graph.result(chain.last("h"))

    def finish(self, request: Payload, values: Sequence[Any]) -> Payload:
        return {"h": np.asarray(values[-1][0])}

    def example(self) -> Payload:
        return {"x": np.ones((2, 3), np.float32)}

    def config(self) -> Mapping[str, Any]:
        return {}


def chains(fn: Any) -> Model:
    return Model("chains", [make_cell("sum", Sums(fn), batch_sizes=SIZES)], Chain())


MIXING: dict[str, Any] = {
    "softmax over rows": lambda h: torch.softmax(h, 0),
    "centred": lambda h: h - h.mean(0),
    "a little": lambda h: h + 1e-7 * h.sum(0),
    "batch norm in training": lambda h: nn.functional.batch_norm(h, None, None, training=True) if len(h) > 1 else h,
    "above four rows": lambda h: h - h.mean(0) if len(h) > 4 else h,
    "where large": lambda h: torch.where(h.abs().max() > 100, h.mean(0) + 0 * h, h),
    "NaN spills": lambda h: h + 0 * h.sum(0),
}


@pytest.mark.parametrize("name", sorted(MIXING))
def test_cells_that_mix_rows_are_refused(name: str):
    with pytest.raises(InvalidInputError, match="cell 'sum' mixes requests"):
        make_cell("sum", Sums(MIXING[name]), batch_sizes=SIZES)
    unchecked = make_cell("sum", Sums(MIXING[name]), batch_sizes=SIZES, check=False)
    with pytest.raises(InvalidInputError, match="cell 'sum' mixes requests"):
        Model("chains", [unchecked], Chain())


def test_a_cell_that_guesses_is_refused():
    with pytest.raises(InvalidInputError, match="random numbers or remembers"):
        make_cell("sum", Sums(lambda h: h + torch.rand_like(h)))


def test_a_compiler_that_mixes_rows_is_refused():
    """Compiled cells are padded to a size; what is beside the rows, zeros or others, may not be seen."""

    def compiler(module: nn.Module, example: Any) -> Any:
        def run(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
            return module(x, h) + (1e-6 * h.sum(0) if len(h) == 8 else 0)

        return run

    MaterialisedCell(make_cell("sum", Sums(), batch_sizes=SIZES), compiler=lambda module, example: module)
    with pytest.raises(InvalidInputError, match="mixes requests"):
        MaterialisedCell(make_cell("sum", Sums(), batch_sizes=SIZES), compiler=compiler)


def picky(h: torch.Tensor) -> torch.Tensor:
    if bool((h > 1000).any()):
        raise ValueError("a sum above 1000")
    return h


@pytest.mark.parametrize("executor", ["cell", "chunk"])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_poisoned_request_fails_alone(executor: Any, num_workers: int):
    """45 requests of other lengths in one batch; two raise in their middle, one ends in infinity."""
    rng = np.random.default_rng(0)
    requests = [rng.standard_normal((4 + number % 7, 3)).astype(np.float32) for number in range(45)]
    for number in (9, 30):
        requests[number][2] = 2000
    requests[20][1] = -np.finfo(np.float32).max
    requests[20][2] = -np.finfo(np.float32).max
    config = EngineConfig(executor=executor, num_workers=num_workers, compiler="eager")
    with Engine(chains(picky), config) as engine:
        for _ in range(2):  # rows of the pool are used again
            futures = [engine.submit({"x": x}) for x in requests]
            for number, (future, x) in enumerate(zip(futures, requests, strict=True)):
                error = future.exception(timeout=600)
                if number in (9, 30):
                    assert isinstance(error, ValueError)
                elif number == 20:
                    assert isinstance(error, ServingError)
                    assert "not finite" in str(error)
                else:
                    assert error is None
                    np.testing.assert_allclose(future.result().outputs["h"], x.sum(0), rtol=1e-4, atol=1e-5)
        assert engine.num_unfinished == 0


def test_auto_serves_what_nimble_refuses(caplog: pytest.LogCaptureFixture):
    """A cell that looks at its values as it runs has no schedule; its module answers all the same."""
    pytest.importorskip("mlsys_nimble")  # alone, this plugin has no compiler to be refused by
    x = np.ones((9, 3), np.float32)
    with Engine(chains(picky), EngineConfig(compiler="auto")) as engine:
        assert engine.submit({"x": x}).result(timeout=600).outputs["h"].tolist() == [9, 9, 9]
        assert isinstance(engine.submit({"x": 1000 * x}).exception(timeout=600), ValueError)
    (said,) = [
        record.getMessage() for record in caplog.records if record.name == "mlsys_batchmaker.workers.materialise"
    ]
    assert said.startswith("cell 'sum' runs as a plain module (eager), since it cannot be compiled: ")
    assert "\n" not in said
    with pytest.raises(InvalidInputError, match=r"cell 'sum' cannot be compiled: .*; --compiler eager"):
        Engine(chains(picky), EngineConfig(compiler="nimble"))


def test_auto_serves_where_a_compiler_is_broken():
    def compiler(module: nn.Module, example: Any) -> Any:
        raise RuntimeError("a fault of its own\nand more")

    made = make_cell("sum", Sums(), batch_sizes=SIZES)
    ready = MaterialisedCell(made, compiler=compiler, falls_back=True)
    assert ready.run([torch.ones(3, 3), torch.ones(3, 3)])[0].tolist() == [[2.0] * 3] * 3
    assert ready.computed(3) == 3, "nothing is padded"
    with pytest.raises(InvalidInputError, match="cannot be compiled: a fault of its own;"):
        MaterialisedCell(made, compiler=compiler)


def test_all_fail_where_all_are_at_fault():
    def broken(h: torch.Tensor) -> torch.Tensor:
        if bool((h > 4).any()):
            raise ValueError("broken")
        return h

    x = np.ones((9, 3), np.float32)
    with Engine(chains(lambda h: h), EngineConfig(compiler="eager")) as engine:
        engine.model.cells[0].module.fn = broken
        futures = [engine.submit({"x": x}) for _ in range(10)]
        assert {str(future.exception(timeout=600)) for future in futures} == {"broken"}
        futures = [engine.submit({"x": x[:3]}) for _ in range(10)]
        assert all(future.result(timeout=600).outputs["h"].tolist() == [3, 3, 3] for future in futures)
