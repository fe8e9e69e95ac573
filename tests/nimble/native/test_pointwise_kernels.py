"""Chains of elementwise operations against torch: every operation, broadcasting, special values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mlsys_nimble.backends.cpu.library import View
from mlsys_nimble.backends.operators import pointwise
from mlsys_nimble.backends.reference.pointwise import compile_pointwise
from mlsys_nimble.ir.checked import OPS
from mlsys_nimble.ir.operators import Pointwise, Step
from mlsys_nimble.ir.program import ValueType
from torch import Tensor

from tests.nimble.native.conftest import in_pieces

CONSTANTS = {"leaky_relu": (0.1,), "elu": (1.5,), "clamp": (-0.75, 1.25)}
SPECIAL = torch.tensor(
    [0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 1e-20, 3e-39, 88.5, -88.0, -100.0, 1e30]
)


def reference(kind: Pointwise, inputs: list[Tensor], out: Tensor, dtype: torch.dtype) -> Tensor:
    types = tuple(ValueType(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in inputs)
    result = ValueType(tuple(out.shape), str(out.dtype).removeprefix("torch."))
    if dtype == torch.float64:
        kind, result = Pointwise(kind.steps, "float64"), ValueType(result.shape, "float64")
    return compile_pointwise(kind, types, result)(*inputs)


def operands(op: str, values: Tensor) -> tuple[list[Tensor], tuple[int | float, ...]]:
    """The inputs of one step over ``values``, and its arguments."""
    num_inputs = OPS[op] - len(CONSTANTS.get(op, ()))
    inputs = [values] + [values.roll(7 * k) for k in range(1, num_inputs)]
    if op in ("log", "sqrt", "rsqrt"):
        inputs = [values.abs()]
    if op == "pow":
        inputs = [values.abs() + 0.1, values.roll(3)]
    return inputs, (*range(num_inputs), *CONSTANTS.get(op, ()))


@pytest.mark.parametrize("op", OPS)
def test_every_operation_is_torchs(op: str, native: Any):
    torch.manual_seed(0)
    values = torch.cat([torch.randn(3000) * 3, torch.randn(300) * 1e-3, torch.arange(-40, 41) / 2])
    inputs, arguments = operands(op, values)
    out = torch.zeros_like(values)
    kind = Pointwise((Step(op, arguments),))
    in_pieces(pointwise.pointwise(kind, [View.of(x) for x in inputs], View.of(out)), out)
    expected = reference(kind, inputs, out, torch.float64)
    atol = 8e-7 if op == "gelu" else 2e-7  # where an error function of 2.9e-7 is half of a factor of up to 5
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=atol)


@pytest.mark.parametrize(
    "op", [op for op in OPS if OPS[op] == 1 or op in CONSTANTS or op in ("maximum", "minimum", "eq")]
)
def test_special_values_are_torchs(op: str, native: Any):
    arguments = (*range(OPS[op] - len(CONSTANTS.get(op, ()))), *CONSTANTS.get(op, ()))
    inputs = [SPECIAL, SPECIAL.roll(3)][: OPS[op] - len(CONSTANTS.get(op, ()))]
    out = torch.zeros_like(SPECIAL)
    kind = Pointwise((Step(op, arguments),))
    pointwise.pointwise(kind, [View.of(x) for x in inputs], View.of(out)).run()
    # In float64: torch's vectors of float32 give gelu(inf) as nan where they are 16 wide, as inf where they are 8.
    expected = reference(kind, inputs, out, torch.float64).float()
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=2e-7, equal_nan=True)


def test_large_angles(native: Any):
    x = torch.cat([torch.linspace(-9000, 9000, 4001), torch.tensor([1e6, -1e9, 8191.9])])
    for op in ("sin", "cos"):
        out = torch.zeros_like(x)
        pointwise.pointwise(Pointwise((Step(op, (0,)),)), [View.of(x)], View.of(out)).run()
        torch.testing.assert_close(out.double(), getattr(torch, op)(x.double()), rtol=0, atol=5e-7)


CHAIN = Pointwise((  # silu(x * scale + shift) * gate + x, clamped
    Step("mul", (0, 1)),
    Step("add", (-1, 2)),
    Step("silu", (-2,)),
    Step("mul", (-3, 3)),
    Step("add", (-4, 0)),
    Step("clamp", (-5, -2.0, 2.0)),
))  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 40, 5, 7), (1, 16, 9, 9), (3, 600, 2, 2), (1, 11, 3, 3), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("channels_last", [True, False])
def test_chains_broadcast(shape: tuple[int, ...], channels_last: bool, native: Any):
    torch.manual_seed(1)
    x, out = torch.randn(shape), torch.zeros(shape)
    if channels_last:
        x, out = (y.contiguous(memory_format=torch.channels_last) for y in (x, out))
    inputs = [x, torch.randn(1, shape[1], 1, 1), torch.randn(()), torch.rand(shape[0], 1, *shape[2:])]
    kernel = pointwise.pointwise(CHAIN, [View.of(y) for y in inputs], View.of(out))
    torch.testing.assert_close(
        in_pieces(kernel, out), reference(CHAIN, inputs, out, torch.float32), rtol=2e-6, atol=1e-6
    )


def test_in_place_and_on_windows(native: Any):
    whole = torch.randn(2, 6, 7, 50)
    out = whole[..., 3:36]
    other = torch.randn(2, 6, 7, 33)
    kind = Pointwise((Step("add", (0, 1)), Step("relu", (-1,))))
    expected, outside = (out + other).relu(), whole[..., 36:].clone()
    in_pieces(pointwise.pointwise(kind, [View.of(out), View.of(other)], View.of(out)), out)
    assert torch.equal(out, expected)
    assert torch.equal(whole[..., 36:], outside)


@pytest.mark.parametrize("dtype", ["int64", "int32", "float64", "bool"])
def test_other_dtypes(dtype: str, native: Any):
    torch.manual_seed(3)
    values = [torch.randint(-9, 10, (5, 77)).to(getattr(torch, dtype)) for _ in range(2)]
    kind = Pointwise((Step("mul", (0, 1)), Step("add", (-1, 3.0)), Step("gt", (-2, 1))), dtype)
    if dtype == "bool":
        kind = Pointwise((Step("logical_and", (0, 1)),))
    out = torch.zeros(5, 77, dtype=torch.bool)
    kernel = pointwise.pointwise(kind, [View.of(x) for x in values], View.of(out))
    expected = reference(kind, values, out, torch.float32)
    assert torch.equal(in_pieces(kernel, out), expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_whole_numbers_wrap_around(dtype: torch.dtype, native: Any):
    limits = torch.iinfo(dtype)
    x = torch.randint(limits.min, limits.max, (3, 700), dtype=dtype)
    x[0, :3] = torch.tensor([limits.min, limits.max, 0], dtype=dtype)
    y = x.flip(1).contiguous()
    name = str(dtype).removeprefix("torch.")
    steps = (Step("mul", (0, 1)), Step("add", (-1, 0)), Step("neg", (-2,)), Step("abs", (-3,)), Step("sub", (-4, 3.0)))
    out = torch.zeros_like(x)
    pointwise.pointwise(Pointwise(steps, name), [View.of(x), View.of(y)], View.of(out)).run()
    assert torch.equal(out, (-(x * y + x)).abs() - 3)
    chosen = Pointwise((Step("lt", (0, 1)), Step("where", (-1, 0, 1)), Step("clamp", (-2, 5.0, 90.0))), name)
    pointwise.pointwise(chosen, [View.of(x), View.of(y)], View.of(out)).run()
    assert torch.equal(out, torch.minimum(x, y).clamp(5, 90))
