"""Pairs of convolutions at the edge of what gains by joining, and the weights that are rounded on request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mlsys_nimble.ir.operators import Convolution, Linear, Separable
from mlsys_nimble.ir.program import Operator, Program, ValueType
from mlsys_nimble.passes.constants import fold_constants, remove_dead_code
from mlsys_nimble.passes.fusion import LEAST_NBYTES, MOST_WEIGHTS_NBYTES, fuse_epilogues, fuse_separables
from mlsys_nimble.passes.precision import round_weights
from torch.nn.functional import conv2d

from tests.nimble.passes.conftest import TWICE, kinds_of

# Separable convolutions, at the edge of what gains.


def pair(channels: int, columns: int, size: int, *, bias: bool = False, **changes: Any) -> Program:
    first = Convolution((1, 1), ((1, 1), (1, 1)), (1, 1), channels, bias)
    second = Convolution((1, 1), ((0, 0), (0, 0)), (1, 1), 1, bias)
    if changes:
        second = Convolution(**{**{f: getattr(second, f) for f in Convolution.__slots__}, **changes})
    image, result = (1, channels, size, size), (1, columns, size, size)
    shapes = [image, (channels, 1, 3, 3), image, (columns, channels, 1, 1), result, (channels,), (columns,)]
    operators = (
        Operator("first", first, (0, 1, 5) if bias else (0, 1), (2,)),
        Operator("second", second, (2, 3, 6) if bias else (2, 3), (4,)),
    )
    constants = {value: torch.randn(shapes[value]) for value in ((1, 3, 5, 6) if bias else (1, 3))}
    return Program(tuple(ValueType(shape, "float32") for shape in shapes), operators, (0,), (4,), constants)


@pytest.mark.parametrize(
    ("channels", "columns", "size", "joins"),
    [
        (96, 8, 32, True),  # exactly LEAST_NBYTES between the two
        (95, 8, 32, False),
        (128, 256, 32, True),  # exactly MOST_WEIGHTS_NBYTES
        (128, 257, 32, False),
    ],
)
def test_a_pair_is_joined_where_it_gains(channels: int, columns: int, size: int, joins: bool, rewritten: Any) -> None:
    assert (LEAST_NBYTES, MOST_WEIGHTS_NBYTES) == (96 * 32 * 32 * 4, 128 * 256 * 4)
    for bias in (False, True):
        x = torch.randn(1, channels, size, size)
        (*_, last) = rewritten((fuse_separables,), pair(channels, columns, size, bias=bias), x).operators
        assert isinstance(last.kind, Separable) == joins
        if joins:
            assert last.name == "second"
            assert last.inputs == ((0, 1, 5, 3, 6) if bias else (0, 1, 3))
            assert (last.kind.depthwise.groups, last.kind.pointwise.groups) == (channels, 1)


@pytest.mark.parametrize(
    "model",
    [
        lambda x, a, b: conv2d(conv2d(x, a, groups=32), b, stride=2),
        lambda x, a, b: conv2d(conv2d(x, a, groups=32), b, stride=(1, 2)),
        lambda x, a, b: conv2d(conv2d(x, a, groups=32), b, padding=(0, 1)),
        lambda x, a, b: conv2d(conv2d(x, a, groups=32), b[:, :16], groups=2),
        lambda x, a, b: conv2d(conv2d(x, a, groups=32), b.expand(8, 32, 1, 2)),
        lambda x, a, b: conv2d(conv2d(x, a.expand(32, 2, 3, 3), groups=16), b),
        lambda x, a, b: conv2d(conv2d(x, a.repeat(2, 1, 1, 1), groups=32), b.repeat(1, 2, 1, 1)),
        lambda x, a, b: conv2d(conv2d(x, a, groups=32).exp(), b),
        lambda x, a, b: conv2d(x, b).exp(),
        lambda x, a, b: conv2d(conv2d(x.double(), a.double(), groups=32), b.double()),
    ],
    ids=[
        "stride",
        "one stride",
        "padding",
        "groups",
        "kernel",
        "two a group",
        "twice the channels",
        "between",
        "one",
        "float64",
    ],
)
def test_pairs_that_only_look_alike_stay_two(model: Any, rewritten: Any) -> None:
    a, b = torch.randn(32, 1, 3, 3), torch.randn(8, 32, 1, 1)
    passes = (fold_constants, remove_dead_code, fuse_separables)
    kinds = kinds_of(rewritten(passes, lambda x: model(x, a, b), torch.randn(1, 32, 66, 66)))
    assert "Separable" not in kinds
    double = rewritten(
        passes, lambda x: conv2d(conv2d(x, a.double(), groups=32), b.double()), torch.randn(1, 32, 66, 66).double()
    )
    assert "Separable" not in kinds_of(double)


def test_a_residual_of_the_first_stays_between_and_one_of_the_second_is_last(rewritten: Any) -> None:
    a, b = torch.randn(32, 1, 3, 3), torch.randn(8, 32, 1, 1)
    x, y = torch.randn(1, 32, 66, 66), torch.randn(1, 32, 64, 64)
    passes = (fuse_epilogues, fuse_separables)
    model = lambda x, y: conv2d(conv2d(x, a, groups=32) + y, b)  # noqa: E731
    assert kinds_of(rewritten(passes, model, x, y)) == ["Convolution", "Convolution"]
    model = lambda x, y: conv2d(conv2d(x, a, groups=32).relu(), b) + y  # noqa: E731
    (joined,) = rewritten(passes, model, x, torch.randn(1, 8, 64, 64)).operators
    assert (joined.inputs[0], joined.inputs[-1]) == (0, 1)


def test_computed_weights_are_not_joined(rewritten: Any) -> None:
    args = torch.randn(1, 32, 66, 66), torch.randn(32, 1, 3, 3), torch.randn(8, 32, 1, 1)
    program = rewritten((fuse_separables,), lambda x, a, b: conv2d(conv2d(x, a, groups=32), b), *args)
    assert "Separable" not in kinds_of(program)
    fixed = torch.randn(32, 1, 3, 3)
    for model in (
        lambda x, b: conv2d(conv2d(x, fixed, groups=32), b),
        lambda x, b: conv2d(conv2d(x, fixed, b[0, :, 0, 0], groups=32), args[2]),
        lambda x, b: conv2d(conv2d(x, fixed, groups=32), args[2], b[:, 0, 0, 0]),
    ):
        assert "Separable" not in kinds_of(rewritten((fuse_separables,), model, args[0], args[2]))


# The loss of precision that was asked for.


@pytest.mark.parametrize("bias", [False, True])
def test_both_weights_of_a_pair_are_rounded_and_its_biases_are_not(bias: bool) -> None:
    joined = fuse_separables(pair(96, 8, 32, bias=bias))
    rounded = round_weights(joined)
    (before,), (after,) = joined.operators, rounded.operators
    for number, (old, new) in enumerate(zip(before.inputs[1:], after.inputs[1:], strict=True)):
        weight = joined.constants[old]
        is_weight = weight.dim() == 4
        assert torch.equal(rounded.constants[new], weight.bfloat16().float() if is_weight else weight), number
        assert (old == new) != is_weight


def test_one_weight_of_a_pair_that_a_call_changes_does_not_keep_the_other(rewritten: Any) -> None:
    joined = fuse_separables(pair(96, 8, 32))
    grown = len(joined.values)
    store = Operator("store", TWICE, (1,), (grown,))
    values = (*joined.values, joined.values[1])
    program = Program(values, (*joined.operators, store), (0,), (4,), joined.constants, ((1, grown),))
    first, second = round_weights(program).operators[0].inputs[1:]
    assert first == 1
    assert second > grown


def test_weights_that_are_computed_changed_or_of_another_dtype_stay() -> None:
    wide = ValueType((4, 4), "float64")
    weight = ValueType((4, 4), "float32")
    operators = (
        Operator("wide", Linear(False), (0, 1), (4,)),
        Operator("changed", Linear(False), (0, 2), (5,)),
        Operator("given", Linear(False), (0, 3), (6,)),
        Operator("rounded", Linear(False), (0, 7), (8,)),
        Operator("again", Linear(False), (8, 7), (9,)),
        Operator("store", TWICE, (2,), (10,)),
    )
    values = (weight, wide, weight, weight, *(weight,) * 7)
    constants = {1: torch.randn(4, 4).double(), 2: torch.randn(4, 4), 7: torch.randn(4, 4)}
    program = Program(values, operators, (0, 3), (4, 5, 6, 9), constants, ((2, 10),))
    rounded = round_weights(program)
    assert [operator.inputs[1] for operator in rounded.operators[:3]] == [1, 2, 3]
    first, again = (operator.inputs[1] for operator in rounded.operators[3:5])
    assert first == again == len(values), "one rounded weight for both"
    assert torch.equal(rounded.constants[first], constants[7].bfloat16().float())
    assert sorted(rounded.constants) == [1, 2, first], "nobody reads the exact one any more"
    assert rounded.values[first] == weight
