"""Every sort of module, replayed on fresh inputs, is the module."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mlsys_nimble import Nimble
from mlsys_nimble.backends.cpu.executor import NativeExecutor
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves

from tests.conformance.nimble.cases import Case
from tests.conformance.nimble.semantics import SEMANTICS
from tests.conformance.nimble.sequences import SEQUENCES
from tests.conformance.nimble.vision import VISION

REPLAYS = 30
EXECUTORS: dict[str, dict[str, Any]] = {
    "reference": {"executor": "reference"},
    "one stream": {"executor": "native", "num_threads": 2, "use_multi_stream": False},
    "two streams": {"executor": "native", "num_threads": 2},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("case", [*VISION, *SEQUENCES, *SEMANTICS], ids=lambda case: case.name)
def test_replays_equal_eager(case: Case, executor: str):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model: nn.Module = case.model()
    trains = isinstance(model, nn.BatchNorm2d) and model.training
    eager = copy.deepcopy(model) if trains else copy.deepcopy(model).eval()
    nimble = prepared(model, case.inputs(generator), EXECUTORS[executor], in_eval_mode=not trains)
    for replay in range(REPLAYS):
        ours = case.inputs(generator)
        theirs = copy.deepcopy(ours)
        if isinstance(nimble, Nimble) and isinstance(executor_of(nimble), NativeExecutor):
            executor_of(nimble).poison()
        with torch.no_grad():
            expected, expected_spec = tree_flatten(eager(*theirs))
            got, spec = tree_flatten(nimble(*ours))
        assert spec == expected_spec
        tolerance = {"rtol": 0.02, "atol": 0.02} if torch.bfloat16 in dtypes(expected) else {"rtol": 1e-4, "atol": 2e-5}
        where = f"replay {replay} of {case.name}: "
        for one, other in zip(got, expected, strict=True):
            if isinstance(other, torch.Tensor):
                torch.testing.assert_close(one, other, **tolerance, msg=lambda text, where=where: where + text)
            else:
                assert one == other
        torch.testing.assert_close(tensors_of(ours), tensors_of(theirs), **tolerance)
        identities = [[one is x for x in tensors_of(ours)] for one in got]
        assert identities == [[one is x for x in tensors_of(theirs)] for one in expected]
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=1e-4, atol=1e-5)


def executor_of(nimble: Nimble) -> Any:
    assert nimble.prepared is not None
    return nimble.prepared.executor


def dtypes(leaves: list[Any]) -> set[torch.dtype]:
    return {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)}


def prepared(model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], *, in_eval_mode: bool) -> Any:
    if in_eval_mode:
        return Nimble(model).prepare(inputs, **options)
    from mlsys_nimble.dynamo import nimble

    return torch.compile(model, backend=nimble, options=options)
