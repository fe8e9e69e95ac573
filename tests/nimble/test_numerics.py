"""Operators that once came out otherwise than eager has them, through both executors and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from mlsys_nimble import Nimble
from mlsys_nimble.errors import CaptureError
from torch import nn
from torch.nn.functional import interpolate, linear, one_hot, pdist, scaled_dot_product_attention

BLIND = torch.ones(5, 5, dtype=torch.bool).tril().index_fill(0, torch.tensor([0, 3]), False)  # rows 0 and 3 see no key
WEIGHT = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class Function(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


def as_eager(function: Callable[..., Any], *tensors: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Results and what is left in the inputs, twice, by each way to run a model."""
    runs: dict[str, Callable[..., Any]] = {
        name: Nimble(Function(function)).prepare([t.clone() for t in tensors], executor=name, num_threads=1)
        for name in ("reference", "native")
    }
    torch._dynamo.reset()
    runs["torch.compile"] = torch.compile(Function(function), backend="nimble", options={"num_threads": 1})
    theirs = [tensor.clone() for tensor in tensors]
    expected = function(*theirs)
    for name, run in runs.items():
        for _ in range(2):
            ours = [tensor.clone() for tensor in tensors]
            with torch.no_grad():
                got = run(*ours)
            torch.testing.assert_close(
                (got, ours),
                (expected, theirs),
                rtol=tolerance,
                atol=tolerance,
                equal_nan=True,
                msg=partial("{}: {}".format, name),
            )


EXPANDED = {
    "reshaped expand": lambda x, y: torch.cat([x.view(-1, 1).expand(2, 4).reshape(-1, 1), y.view(-1, 1)], 1),
    "meshgrid": lambda x, y: torch.stack([g.flatten() for g in torch.meshgrid(x, y, indexing="ij")], -1),
    "repeat": lambda x, y: torch.cat([x.repeat(4).view(-1, 1), y.view(-1, 1)], 1),
    "repeat_interleave": lambda x, y: torch.cat([x.view(-1, 1).repeat_interleave(4, 0), y.view(-1, 1)], 1),
    "pairs": lambda x, y: torch.cat(
        [y.view(8, 1, 1).expand(8, 8, 1), y.view(1, 8, 1).expand(8, 8, 1), (y * 2).view(8, 1, 1).expand(8, 8, 1)], 2
    ).reshape(64, 3),
    "cartesian_prod": lambda x, y: torch.cartesian_prod(x, y),
    "transposed": lambda x, y: torch.cat([y.view(2, 4).t().reshape(8, 1), y.view(8, 1)], 1),
}


@pytest.mark.parametrize("function", EXPANDED.values(), ids=EXPANDED)
def test_parts_of_a_concatenation_that_are_told_otherwise_in_memory(function: Any):
    as_eager(function, torch.randn(2), torch.randn(8))


def test_linears_beside_each_other_along_a_dimension_that_rows_cross():
    as_eager(lambda x: torch.cat([linear(x, WEIGHT), linear(x + 1, WEIGHT)], 1), torch.randn(3, 4, 8))


COMPLEX = {
    "abs": torch.abs,
    "angle": torch.angle,
    "eq": lambda x: x == x.conj(),
    "ne": lambda x: x != 0,
    "logical_not": torch.logical_not,
    "real": lambda x: x.real + x.imag,
    "square": lambda x: x.square() + x * 2,
    "alpha": lambda x: torch.add(x, x, alpha=2j) + torch.rsub(x, x, alpha=3),
    "where": lambda x: torch.where(x.abs() > 1, x, 0),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.25j),
    "mean": lambda x: x.mean() + x.sum(),
}


@pytest.mark.parametrize("function", COMPLEX.values(), ids=COMPLEX)
def test_complex_numbers(function: Any):
    as_eager(function, torch.randn(7, dtype=torch.complex64))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_images_of_bytes_are_resized_to_the_bit(mode: str, channels_last: bool):
    form = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randint(0, 255, (2, 3, 6, 5)).to(torch.uint8)
    as_eager(lambda x: interpolate((x // 2).to(memory_format=form), (5, 7), mode=mode), x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_integers_wrap_around(dtype: torch.dtype):
    limits = torch.iinfo(dtype)
    x = torch.tensor([limits.min, limits.max, limits.max // 2 + 1, 3, 1, 0], dtype=dtype)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chosen, total = torch.where(x - 1 < x, x * 3, -x), x.sum(0, dtype=x.dtype) * 2 + x
        return x + x, x * x + x, (x + x) > 3, chosen, x.square().clamp(2, 100), total

    as_eager(function, x)


MASKS = {
    "bool": BLIND,
    "float": torch.zeros(5, 5).masked_fill(~BLIND, -torch.inf),
    "by head": torch.stack([BLIND, ~BLIND]),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_query_that_sees_no_key_gives_zero(mask: torch.Tensor):
    q = torch.randn(3, 2, 5, 8)
    as_eager(lambda q, m: scaled_dot_product_attention(q, q * 2, q + 1, m), q, mask)
    assert not scaled_dot_product_attention(q, q, q, MASKS["bool"])[:, :, 0].any()


def test_a_query_that_sees_no_key_is_no_number_in_attention_by_hand():
    q = torch.randn(3, 2, 5, 8)
    as_eager(lambda q, m: torch.softmax(q @ q.mT * 0.3 + m, -1) @ q, q, MASKS["float"])


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_query_that_sees_no_key_has_gradients_as_in_eager(mask: torch.Tensor):
    model = Function(lambda q, m: scaled_dot_product_attention(q, q * 2, q + 1, m))
    for executor in ("auto", "reference"):
        ours, theirs = (torch.linspace(-1, 1, 240).view(3, 2, 5, 8).requires_grad_() for _ in range(2))
        prepared = Nimble(model).prepare((ours, mask), training=True, executor=executor)
        got, expected = prepared(ours, mask), model(theirs, mask)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y, x in ((got, ours), (expected, theirs))]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


SCALARS = {
    "mean": lambda x: x.mean() * 2 + 1,
    "sum": lambda x: 1 - x.sum(),
    "cross entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean() * 0.5 + 1,
    "argument": lambda x: (x[0, 0] - 3) / 2,
    "product": lambda x: (x[0] @ x[1]) * 3 - 1,
    "dot": lambda x: 2 - x[0].dot(x[1]) / 4,
}


@pytest.mark.parametrize("function", SCALARS.values(), ids=SCALARS)
def test_scales_and_shifts_of_single_numbers(function: Any):
    as_eager(function, torch.randn(3, 4))


AFFINE = {
    "const - x": lambda x: 3 - linear(x, WEIGHT),
    "x - const": lambda x: linear(x, WEIGHT) - 3,
    "-x": lambda x: -linear(x, WEIGHT) * 2 + 1,
    "const - x before": lambda x: linear(3 - x * 2, WEIGHT),
    "x / 0": lambda x: linear(x, WEIGHT) / 0,
    "x * infinity": lambda x: linear(x * torch.inf, WEIGHT),
    "rows": lambda x: torch.arange(6.0) - linear(x, WEIGHT) / torch.arange(1.0, 7.0),
    "cat": lambda x: 2 - torch.cat([linear(x, WEIGHT), x], -1),
    "y + y": lambda x: (y := linear(x, WEIGHT)) + y,
    "y - y": lambda x: (y := linear(x, WEIGHT)) - y,
    "relu(y) + y": lambda x: (y := linear(x, WEIGHT)).relu() + y,
    "x + y": lambda x: linear(x, WEIGHT) + linear(x + 1, WEIGHT),
}


@pytest.mark.parametrize("function", AFFINE.values(), ids=AFFINE)
def test_scales_and_shifts_beside_products(function: Any):
    as_eager(function, torch.randn(3, 8))


WRITTEN = {
    "other order of arguments": lambda x: x.clone().polygamma_(1),
    "composite": lambda x: x.clone().ldexp_(torch.arange(4)),
    "dtype of the comparison": lambda x: x.clone().eq_(x.double() + 1e-12),
    "out": lambda x: torch.add(x, 1, out=torch.zeros(4)),
    "out of an input": lambda x: torch.mul(x, 3, out=x) + x,
    "out of a view": lambda x: (y := torch.zeros(3, 4), torch.exp(x, out=y[1]))[0],
    "two outs": lambda x: torch.max(x.view(2, 2), 1, out=(torch.zeros(2), torch.zeros(2, dtype=torch.int64))),
    "out of another dtype": lambda x: torch.add(x, 1, out=torch.zeros(4, dtype=torch.float64)),
}


@pytest.mark.parametrize("function", WRITTEN.values(), ids=WRITTEN)
def test_operators_that_write(function: Any):
    as_eager(function, torch.rand(4) + 1)


def test_an_out_that_is_resized_is_refused():
    with pytest.raises(CaptureError, match="changes the shape"):
        Nimble(Function(lambda x: torch.add(x, 1, out=torch.empty(0)))).prepare(torch.ones(4))


SIZED = {  # a function, values that go with the shape that it gives, and some that do not
    "one_hot": (lambda x: one_hot(x, num_classes=5).float() * 2, [0, 4, 2], [3, 3, 1], [[3, 5, 1], [3, -1, 1]]),
    "repeat_interleave": (
        lambda x: torch.repeat_interleave(torch.arange(3.0), x, output_size=4) * 2,
        [1, 2, 1],
        [4, 0, 0],
        [[1, 1, 1], [3, 3, 3]],
    ),
}


@pytest.mark.parametrize(("function", "example", "other", "bad"), SIZED.values(), ids=SIZED)
@pytest.mark.parametrize("executor", ["reference", "native"])
def test_a_shape_that_an_argument_fixes(function: Any, example: Any, other: Any, bad: Any, executor: str):
    as_eager(function, torch.tensor(example))
    model = Nimble(Function(function)).prepare(torch.tensor(example), executor=executor, num_threads=1)
    torch.testing.assert_close(model(torch.tensor(other)), function(torch.tensor(other)))
    for values in bad:
        with pytest.raises(RuntimeError) as eager:
            function(torch.tensor(values))
        with pytest.raises(RuntimeError, match=str(eager.value)):
            model(torch.tensor(values))
    torch.testing.assert_close(model(torch.tensor(other)), function(torch.tensor(other)))


@pytest.mark.parametrize("function", [one_hot, lambda x: torch.repeat_interleave(torch.arange(3.0), x)])
def test_a_shape_that_values_decide_is_refused(function: Any):
    with pytest.raises(CaptureError, match="shape of its result depends on values"):
        Nimble(Function(function)).prepare(torch.tensor([0, 4, 2]), executor="reference")


def test_operators_for_which_strides_matter():
    as_eager(
        lambda x: pdist(x.t().contiguous()) + pdist(x.t().clone(memory_format=torch.contiguous_format)),
        torch.randn(4, 5),
    )
    as_eager(lambda x: (x * 2).as_strided((2, 2), (3, 1), 1), torch.randn(4, 5))
    with pytest.raises(CaptureError, match="as_strided of a tensor that is itself a view"):
        Nimble(Function(lambda x: x[1:].as_strided((2, 2), (3, 1)))).prepare(torch.ones(4, 5))


LONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "whole": lambda x: (x.sum(), x.mean(), x.norm()),
    "columns": lambda x: x.view(-1, 32).mean(0),
    "strided": lambda x: x.view(-1, 4, 8).sum((0, 2)),
    "normalised": lambda x: torch.nn.functional.layer_norm(x.view(2, -1) * 10 + 3, (x.numel() // 2,)),
    "softmax": lambda x: (x * 0).softmax(0) * x.numel(),
}


@pytest.mark.parametrize("name", LONG)
def test_sums_of_many_numbers_do_not_drift(name: str):
    function, x = LONG[name], torch.full((1 << 21,), 0.1)
    x[1::2] = 0.2
    model = Nimble(Function(function)).prepare(x)
    torch.testing.assert_close(model(x), to_float(function(x.double())), rtol=4e-6, atol=1e-6)


def to_float(tree: Any) -> Any:
    return tuple(map(torch.Tensor.float, tree)) if isinstance(tree, tuple) else tree.float()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_whose_squares_do_not_fit(dtype: torch.dtype):
    x = torch.full((5000,), 20.0, dtype=dtype)
    model = Nimble(Function(lambda x: (x.norm(), torch.nn.functional.normalize(x, dim=0)))).prepare(x)
    torch.testing.assert_close(model(x), model.model(x))


def test_memory_put_in_place_of_a_tensors_is_refused():
    def replaced(x: torch.Tensor) -> torch.Tensor:
        x.data = x.data * 2
        return x + 1

    with pytest.raises(CaptureError, match=r"another memory \(x.data = ...\)"):
        Nimble(Function(replaced)).prepare(torch.ones(3))
