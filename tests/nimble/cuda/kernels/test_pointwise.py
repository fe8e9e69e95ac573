"""Printed kernels beside torch's own operators: every step, strides of every kind, every dtype."""

from __future__ import annotations

import pytest
import torch
from mlsys_nimble.backends.cuda.functions import make_pointwise
from mlsys_nimble.backends.cuda.triton_printer import can_print
from mlsys_nimble.backends.reference.pointwise import compile_pointwise
from mlsys_nimble.ir.checked import OPS
from mlsys_nimble.ir.operators import Pointwise, Step
from mlsys_nimble.ir.program import ValueType
from torch import Tensor

PRINTED = sorted(op for op in OPS if can_print(Pointwise((Step(op, (0,) * OPS[op]),))))
WITH_CONSTANTS = {"leaky_relu": (0, 0.2), "elu": (0, 1.5), "clamp": (0, -0.5, 0.75)}


def type_of(tensor: Tensor) -> ValueType:
    return ValueType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def check(kind: Pointwise, tensors: list[Tensor], result: ValueType, *, tolerance: float = 2e-6) -> Tensor:
    types = tuple(map(type_of, tensors))
    run = make_pointwise(kind, types, result)
    assert run is not None
    made = run(*tensors)
    wanted = compile_pointwise(kind, types, result)(*tensors)
    assert made.dtype == wanted.dtype
    torch.testing.assert_close(made, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    return made


def test_few_steps_are_left_to_torch():
    assert set(OPS) - set(PRINTED) == {"pow", "round"}


@pytest.mark.parametrize("op", PRINTED)
def test_every_step(op: str, place: torch.device):
    arguments = WITH_CONSTANTS.get(op, tuple(range(OPS[op])))
    count = sum(isinstance(argument, int) for argument in arguments)
    torch.manual_seed(len(op))
    tensors = [torch.randn(1500, device=place) * 3 for _ in range(count)]
    for number, tensor in enumerate(tensors):
        tensor[:4] = torch.tensor([0.0, -0.0, 1.0, -1.0])
        if op in ("maximum", "minimum", "relu", "where", "eq", "lt", "clamp"):
            tensor[4 + number] = float("nan")
    if op in ("log", "sqrt", "rsqrt"):
        tensors = [tensor.abs() + 0.1 for tensor in tensors]
    if op in ("div", "reciprocal"):
        tensors = [tensor.sign() * (tensor.abs() + 0.1) + 0.05 for tensor in tensors]
    check(Pointwise((Step(op, arguments),)), tensors, type_of(tensors[0]), tolerance=5e-6)


@pytest.mark.parametrize("op", ["tanh", "elu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_digits_are_lost_near_zero(op: str, dtype: torch.dtype, place: torch.device):
    sizes = torch.logspace(-30, 1.5, 400, dtype=dtype, device=place)
    x = torch.cat([sizes, -sizes])
    kind = Pointwise((Step(op, (0, 1.5) if op == "elu" else (0,)),), dtype=str(dtype).removeprefix("torch."))
    run = make_pointwise(kind, (type_of(x),), type_of(x))
    assert run is not None
    wanted = torch.tanh(x.double()) if op == "tanh" else torch.where(x > 0, x.double(), 1.5 * torch.expm1(x.double()))
    torch.testing.assert_close(run(x).double(), wanted, rtol=8 * torch.finfo(dtype).eps, atol=0.0)


CHAIN = (Step("mul", (0, 1)), Step("add", (-1, 2)), Step("relu", (-2,)), Step("sub", (-3, -0.5)))


def test_a_chain_over_windows_of_all_kinds(place: torch.device):
    x = torch.randn(2, 6, 5, 7, device=place).contiguous(memory_format=torch.channels_last)
    scale, shift = torch.randn(6, 1, 1, device=place), torch.randn(2, 6, 7, 5, device=place).transpose(2, 3)
    made = check(Pointwise(CHAIN), [x, scale, shift], type_of(x))
    assert made.is_contiguous(memory_format=torch.channels_last)
    one = torch.randn((), device=place)
    sliced = torch.randn(2, 6, 5, 14, device=place)[..., ::2]
    check(Pointwise(CHAIN), [sliced, one, x[:, :1]], type_of(sliced))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype, place: torch.device):
    tensors = [torch.randn(300, device=place).to(dtype) for _ in range(3)]
    name = str(dtype).removeprefix("torch.")
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 4e-2, torch.float64: 1e-7}[dtype]
    check(Pointwise(CHAIN, name), tensors, type_of(tensors[0]), tolerance=tolerance)


def test_booleans_are_read_and_made(place: torch.device):
    mask, x = torch.rand(300, device=place) > 0.5, torch.randn(300, device=place)
    check(Pointwise((Step("where", (0, 1, 0.0)),)), [mask, x], type_of(x))
    check(Pointwise((Step("gt", (0, 0.25)),)), [x], ValueType((300,), "bool"))


def test_dtypes_that_are_not_floating_are_left_to_torch():
    kind = Pointwise((Step("add", (0, 1.0)),), "int64")
    assert make_pointwise(kind, (ValueType((4,), "int64"),), ValueType((4,), "int64")) is None
