from __future__ import annotations

import pytest
import torch
from mlsys_nimble.backends.reference.operators import ReferenceExecutor
from mlsys_nimble.capture import capture
from mlsys_nimble.ir.operators import (
    Aten,
    BatchNormGradient,
    BatchNormTraining,
    Concat,
    Epilogue,
    Pad,
    Pointwise,
    Reduce,
)
from mlsys_nimble.ir.program import Program, check_program
from mlsys_nimble.passes import optimise
from mlsys_nimble.training.passes import TRAINING_PASSES
from torch import Tensor

ATEN = torch.ops.aten


def norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
    made: tuple[Tensor, ...] = ATEN._native_batch_norm_legit_functional(x, weight, bias, mean, var, True, 0.1, 1e-5)
    return made


def optimised(function: object, *inputs: Tensor) -> Program:
    captured = capture(function, inputs)  # type: ignore[arg-type]
    program, _ = optimise(captured.program, TRAINING_PASSES)
    check_program(program)
    for made, wanted in zip(ReferenceExecutor(program).run(inputs), function(*inputs), strict=True):  # type: ignore[operator]
        torch.testing.assert_close(made, wanted)
    return program


def inputs(*, residual: bool = False) -> list[Tensor]:
    shape = (2, 4, 3, 3)
    statistics = [torch.rand(4) + 0.5 for _ in range(4)]
    return [torch.randn(shape), *statistics, *([torch.randn(shape)] if residual else [])]


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("has_relu", [False, True])
def test_residual_and_relu_become_a_batch_norms_epilogue(has_residual: bool, has_relu: bool):
    def forward(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        y, *statistics = norm(x, *rest[:4])
        y = rest[4] + y if has_residual else y
        return (torch.relu(y) if has_relu else y, *statistics)

    program = optimised(forward, *inputs(residual=has_residual))
    (operator,) = program.operators
    wanted = Epilogue("relu" if has_relu else None, has_residual=has_residual)
    assert isinstance(operator.kind, BatchNormTraining)
    assert operator.kind.epilogue == wanted


def test_the_later_of_two_added_norms_takes_the_sum():
    def forward(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        one, *_ = norm(x, *rest)
        two, *_ = norm(x * 2, *rest)
        return (torch.relu(one + two),)

    program = optimised(forward, *inputs())
    first, last = (op for op in program.operators if isinstance(op.kind, BatchNormTraining))
    assert isinstance(first.kind, BatchNormTraining)
    assert isinstance(last.kind, BatchNormTraining)
    assert (first.kind.epilogue, last.kind.epilogue) == (Epilogue(), Epilogue("relu", has_residual=True))
    assert first.outputs[0] in last.inputs


def test_a_norm_that_others_read_keeps_its_result():
    def forward(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        y, *_ = norm(x, *rest)
        return torch.relu(y), y.sum((0, 2, 3))

    program = optimised(forward, *inputs())
    assert any(isinstance(operator.kind, Pointwise) for operator in program.operators)


def test_gradients_of_norms_and_of_activations_are_found_and_fused():
    def backward(x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, dy: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        dy = ATEN.threshold_backward(dy + dy.square(), y, 0.0)
        made = ATEN.native_batch_norm_backward(dy, x, weight, None, None, mean, rstd, True, 1e-5, [True] * 3)
        return tuple(made)

    x, weight, mean, rstd, *_ = inputs()
    program = optimised(backward, x, weight, mean, rstd, torch.randn_like(x), torch.randn_like(x))
    assert [type(operator.kind) for operator in program.operators] == [Pointwise, BatchNormGradient]


BACKWARD = {
    "threshold_backward": lambda dy, x: ATEN.threshold_backward(dy, x, 0.5),
    "native_dropout_backward": lambda dy, x: ATEN.native_dropout_backward(dy, x > 0, 1.25),
    "sigmoid_backward": ATEN.sigmoid_backward,
    "tanh_backward": ATEN.tanh_backward,
    "silu_backward": ATEN.silu_backward,
    "hardtanh_backward": lambda dy, x: ATEN.hardtanh_backward(dy, x, -0.5, 1.0),
    "gelu_backward": ATEN.gelu_backward,
}


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_of_elementwise_operators_are_elementwise(name: str):
    function = BACKWARD[name]
    program = optimised(lambda dy, x: (function(dy, x),), torch.randn(64), torch.randn(64))
    (operator,) = program.operators
    assert isinstance(operator.kind, Pointwise)


def test_gradients_of_all_parts_are_joined():
    def backward(*parts: Tensor) -> tuple[Tensor, ...]:
        sizes = [3, *parts[0].shape]
        made = [ATEN.select_backward(part, sizes, 0, index) for index, part in zip((2, -2, 0), parts, strict=True)]
        return (made[0] + made[1] + made[2],)

    program = optimised(backward, *(torch.randn(2, 4) for _ in range(3)))
    assert Concat(0) in [operator.kind for operator in program.operators]
    assert not any(isinstance(operator.kind, Pad) for operator in program.operators)


def test_gradients_of_some_parts_or_of_parts_that_overlap_are_added():
    def backward(one: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        apart = ATEN.slice_backward(one, [2, 9], 1, 0, 4, 1) + ATEN.slice_backward(other, [2, 9], 1, 4, 8, 1)
        over = ATEN.slice_backward(one, [2, 6], -1, 0, 4, 1) + ATEN.slice_backward(other, [2, 6], -1, -4, 6, 1)
        whole = ATEN.slice_backward(one, [2, 8], 1, 0, 4, 1) + ATEN.slice_backward(other, [2, 8], 1, 4, 8, 1)
        return apart, over, whole

    program = optimised(backward, torch.randn(2, 4), torch.randn(2, 4))
    assert sum(isinstance(operator.kind, Pad) for operator in program.operators) == 4
    assert sum(isinstance(operator.kind, Concat) for operator in program.operators) == 1


@pytest.mark.parametrize("wanted", [(True, True, True), (False, True, True), (True, False, True), (True, True, False)])
def test_gradients_of_a_convolution_become_operators_of_their_own(wanted: tuple[bool, bool, bool]):
    def backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        made = ATEN.convolution_backward(dy, x, weight, [6], [2, 2], [1, 1], [1, 1], False, [0, 0], 1, list(wanted))
        return tuple(gradient for gradient, is_wanted in zip(made, wanted, strict=True) if is_wanted)

    program = optimised(backward, torch.randn(2, 6, 3, 3), torch.randn(2, 4, 6, 6), torch.randn(6, 4, 3, 3))
    assert [isinstance(operator.kind, Reduce) for operator in program.operators] == [False] * sum(wanted[:2]) + [
        True
    ] * wanted[2]
    masks = [operator.kind.arguments[-1] for operator in program.operators if isinstance(operator.kind, Aten)]
    assert masks == [
        mask for mask, is_wanted in zip(((True, False, False), (False, True, False)), wanted, strict=False) if is_wanted
    ]
