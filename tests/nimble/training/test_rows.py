"""Linear layers of training graphs, fused with the operators around them: same results, fewer views."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mlsys_nimble import Nimble
from mlsys_nimble.backends.reference.operators import ReferenceExecutor
from mlsys_nimble.capture import capture
from mlsys_nimble.ir.operators import (
    Copy,
    Epilogue,
    Gemm,
    MatMul,
    Permute,
    Pointwise,
    Reduce,
    Reshape,
    WeightGradient,
)
from mlsys_nimble.ir.program import Program, check_program
from mlsys_nimble.passes import optimise
from mlsys_nimble.passes.constants import remove_dead_code
from mlsys_nimble.training.chains import straighten
from mlsys_nimble.training.passes import TRAINING_PASSES
from mlsys_nimble.training.rows import join_rows, share_saved_copies
from torch import Tensor, nn


def joined(function: Callable[..., Any], *inputs: Tensor) -> Program:
    program, _ = optimise(capture(function, inputs).program, TRAINING_PASSES)
    program = join_rows(program, 8)
    check_program(program)
    for made, wanted in zip(ReferenceExecutor(program).run(inputs), function(*inputs), strict=True):
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-4)
    return program


def kinds(program: Program) -> list[type]:
    return [type(operator.kind) for operator in program.operators]


def test_a_layer_between_turned_rows_is_one_product():
    def forward(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> tuple[Tensor]:
        rows = x.permute(1, 0, 2).contiguous().view(-1, 16)
        y = (rows @ weight.t() + bias).view(12, 8, 24).permute(1, 0, 2)
        return (torch.relu(y + residual),)

    program = joined(forward, torch.randn(8, 12, 16), torch.randn(24, 16), torch.randn(24), torch.randn(8, 12, 24))
    (gemm,) = (operator for operator in program.operators if isinstance(operator.kind, Gemm))
    assert gemm.kind == Gemm(has_bias=True, epilogue=Epilogue("relu", has_residual=True))
    assert kinds(program) == [Permute, Gemm]  # of the weight
    assert gemm.inputs[0] == program.inputs[0]


def test_the_gradients_of_a_layer():
    def backward(dy: Tensor, x: Tensor, weight: Tensor, seen: Tensor) -> tuple[Tensor, ...]:
        rows = dy.permute(1, 0, 2).reshape(-1, 24)
        dx = (rows @ weight).view(12, 8, 16).permute(1, 0, 2)
        return rows.sum(0), torch.where(seen <= 0, 0.0, dx), rows.t() @ x.permute(1, 0, 2).reshape(-1, 16)

    x = torch.randn(8, 12, 16)
    program = joined(backward, torch.randn(8, 12, 24), x, torch.randn(24, 16), torch.relu(torch.randn(8, 12, 16)))
    assert Gemm(has_mask=True) in [operator.kind for operator in program.operators]
    assert WeightGradient(has_bias=True) in [operator.kind for operator in program.operators]
    assert not {Reduce, Pointwise, MatMul}.intersection(kinds(program))


def test_a_result_that_others_read_stays():
    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y = x @ weight
        return y, torch.relu(y), torch.sigmoid(x @ weight + x.sum(1, keepdim=True))

    program = joined(forward, torch.randn(96, 16), torch.randn(16, 24))
    assert all(kind.kind == Gemm() for kind in program.operators if isinstance(kind.kind, Gemm))


@pytest.mark.parametrize(("rows", "columns"), [(8, 24), (96, 10)])
def test_few_rows_and_odd_widths_stay_matmuls(rows: int, columns: int):
    program = joined(lambda x, weight: (x @ weight,), torch.randn(rows, 16), torch.randn(16, columns))
    assert kinds(program) == [MatMul]


def test_dimensions_merged_and_split_again_are_not_merged():
    def heads(x: Tensor) -> tuple[Tensor]:
        return (x.permute(1, 0, 2).reshape(6, 20, 4).permute(1, 0, 2).reshape(5, 4, 6, 4) + 0.0,)

    program, _ = optimise(capture(heads, (torch.randn(5, 6, 16),)).program, TRAINING_PASSES)
    program = remove_dead_code(straighten(program))
    assert kinds(program)[:2] == [Reshape, Permute]
    shapes = [program.values[operator.outputs[0]].shape for operator in program.operators[:2]]
    assert shapes == [(5, 6, 4, 4), (5, 4, 6, 4)]


def test_only_copies_that_the_caller_does_not_see_are_shared():
    def forward(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.relu(x)
        return y.clone(), y.sigmoid().clone(), x.clone(), y.clone()

    program = capture(forward, (torch.randn(4, 4),)).program
    copies = kinds(program).count(Copy)
    assert kinds(share_saved_copies(program, 4)).count(Copy) == copies
    assert kinds(share_saved_copies(program, 1)).count(Copy) < copies
    shared = share_saved_copies(program, 1)
    assert program.inputs[0] not in shared.outputs  # what the caller may still write to is copied
    assert shared.outputs[0] not in shared.outputs[1:]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transformer_layer_trains_as_eager_does(activation: str, norm_first: bool, dtype: torch.dtype):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        64, 4, 128, dropout=0.0, batch_first=True, activation=activation, norm_first=norm_first
    )
    eager, exact, x = copy.deepcopy(layer), copy.deepcopy(layer).double(), torch.randn(8, 12, 64)
    model = Nimble(layer).prepare(x, training=True)
    for _ in range(2):  # gradients accumulate
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            losses = [call(x).float().square().mean() for call in (model, eager)]
        for loss in (*losses, exact(x.double()).square().mean()):
            loss.backward()
    ours, eagers, wanted = (
        torch.cat([parameter.grad.double().flatten() for parameter in module.parameters()])  # type: ignore[union-attr]
        for module in (layer, eager, exact)
    )
    allowed = max(1e-5, 1.5 * float((eagers - wanted).norm() / wanted.norm()))  # half widths: as near as eager
    assert (ours - wanted).norm() / wanted.norm() < allowed
