"""Feed-forward parts by a registered compiler: the same answers at every size; what cannot be compiled is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from mlsys_core.errors import InvalidInputError, PluginError
from mlsys_core.plugins import Registry, installed_plugins
from mlsys_core.plugins.loading import find_module_compiler
from mlsys_core.plugins.specs import CompilerSpec
from mlsys_orca.backends.compiled import CompiledRows, compile_decodes
from mlsys_orca.loading.load import load_model
from mlsys_orca.model.blocks import MLP, GatedMLP
from mlsys_orca.model.layers import Linear


class Spy:
    """A compiler that gives modules as they are, and knows for how many rows and how often they ran."""

    def __init__(self) -> None:
        self.examples: list[tuple[int, ...]] = []
        self.ran: list[int] = []

    def __call__(self, module: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.examples += [tuple(value.shape) for value in example_inputs]

        def run(x: torch.Tensor) -> torch.Tensor:
            self.ran.append(len(x))
            return module(x)

        return run


def gated() -> GatedMLP:
    torch.manual_seed(0)
    return GatedMLP(Linear(torch.randn(12, 4)), Linear(torch.randn(4, 6)), activation="silu")


def plain() -> MLP:
    torch.manual_seed(0)
    return MLP(Linear(torch.randn(6, 4), torch.randn(6)), Linear(torch.randn(4, 6), torch.randn(4)), activation="gelu")


@pytest.mark.parametrize("make", [gated, plain])
def test_rows_are_what_the_part_gives_at_every_size(make: Callable[[], MLP | GatedMLP]) -> None:
    spy = Spy()
    rows = CompiledRows(make(), spy, [1, 2, 4], device=torch.device("cpu"), dtype=torch.float32)
    assert spy.examples == [(1, 4), (2, 4), (4, 4)]
    for count in range(1, 7):
        x = torch.randn(count, 4)
        assert torch.allclose(rows(x), make()(x), atol=1e-6)
    assert spy.ran == [1, 2, 4, 4], "5 and 6 rows run as they are"


def test_a_model_by_nimble_answers_as_without(make_gguf: Callable[..., Path]) -> None:
    compiler = find_module_compiler("nimble", installed_plugins().registry)
    parts = []
    for is_compiled in (False, True):
        model: Any = load_model(make_gguf(), dtype="fp32", backend="torch").model
        if is_compiled:
            model = compile_decodes(model, compiler, 4)
            assert all(isinstance(layer.mlp, CompiledRows) for layer in model.layers)
        torch.manual_seed(1)
        with torch.inference_mode():
            parts.append([layer.mlp(torch.randn(count, 64)) for layer in model.layers for count in (1, 3, 4, 9)])
    for one, other in zip(*parts, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_program_that_torch_cannot_run_is_refused(make_gguf: Callable[..., Path]) -> None:
    with pytest.raises(InvalidInputError, match="layer by layer in torch's operators"):
        compile_decodes(load_model(make_gguf(), dtype="fp32", backend="native").model, Spy(), 2)
    packed = load_model(make_gguf(), dtype="fp32", backend="torch", weights="int8").model
    with pytest.raises(InvalidInputError, match="no layer of this model has a feed-forward part in floating point"):
        compile_decodes(packed, Spy(), 2)


def test_a_compiler_that_fails_or_gives_nothing_to_call_is_named() -> None:
    registry = Registry()
    registry.add(CompilerSpec(name="broken", help="x", factory="operator:truediv"), "mlsys-test")
    registry.add(CompilerSpec(name="empty", help="x", factory="operator:eq"), "mlsys-test")
    with pytest.raises(PluginError, match="compiler 'broken' of mlsys-test failed"):
        find_module_compiler("broken", registry)(1, (0,))
    with pytest.raises(PluginError, match="compiler 'empty' of mlsys-test: it gave a bool"):
        find_module_compiler("empty", registry)(1, (0,))
    with pytest.raises(InvalidInputError, match="no compiler is called 'nimbel'"):
        find_module_compiler("nimbel", registry)
