"""Borders and cuts beside a convolution or a pool, written by hand: which become its padding, and which must stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_nimble.backends.reference.operators import ReferenceExecutor
from mlsys_nimble.capture import capture
from mlsys_nimble.ir.operators import Convolution, Epilogue, Pad, Pool, Slice
from mlsys_nimble.ir.program import Operator, Program, ValueType, check_program
from mlsys_nimble.passes.constants import remove_dead_code
from mlsys_nimble.passes.folding import fold_borders
from torch.nn.functional import avg_pool2d, conv2d, max_pool2d, pad

from tests.nimble.passes.conftest import kinds_of

FOLD = (fold_borders, remove_dead_code)
Pairs = tuple[tuple[int, int], ...]


def padded(border: Pairs, own: Pairs, *, value: float = 0.0, op: Literal["max"] | None = None) -> Program:
    """A border around an image of 7x7, then a convolution or a pool of 3x3 with a padding of its own."""
    amounts = ((0, 0), (0, 0), *border)
    sizes = [7 + sum(added) for added in border]
    results = [size + sum(pair) - 2 for size, pair in zip(sizes, own, strict=True)]
    kind: Any = Convolution((1, 1), own, (1, 1), 1, False) if op is None else Pool(op, (3, 3), (1, 1), own, (1, 1))
    shapes = [(1, 2, 7, 7), (1, 2, *sizes), (2, 2, 3, 3), (1, 2, *results)]
    values = tuple(ValueType(shape, "float32") for shape in shapes)
    operators = (
        Operator("border", Pad(amounts, value), (0,), (1,)),
        Operator("main", kind, (1, 2) if op is None else (1,), (3,)),
    )
    return Program(values, operators, (0,), (3,), {2: torch.randn(2, 2, 3, 3)} if op is None else {})


@pytest.mark.parametrize(
    ("border", "own", "expected"),
    [
        (((1, 0), (0, 1)), ((0, 0), (0, 0)), ((1, 0), (0, 1))),
        (((1, 2), (3, 0)), ((1, 1), (0, 1)), ((2, 3), (3, 1))),
        (((-1, -2), (0, 0)), ((0, 0), (0, 0)), ((-1, -2), (0, 0))),  # a border cut off where no zeros are added
        (((-1, 0), (0, 0)), ((1, 0), (0, 0)), None),  # zeros where the cut rows were: not those rows
        (((0, -1), (0, 0)), ((0, 1), (0, 0)), None),
        (((0, 0), (-2, 0)), ((0, 0), (-1, 0)), ((0, 0), (-3, 0))),
        (((2, 2), (0, 0)), ((-1, -1), (0, 0)), ((1, 1), (0, 0))),
    ],
)
def test_zeros_before_a_convolution_are_its_padding(border: Pairs, own: Pairs, expected: Any, rewritten: Any) -> None:
    program = rewritten(FOLD, padded(border, own), torch.randn(1, 2, 7, 7))
    assert kinds_of(program) == (["Pad", "Convolution"] if expected is None else ["Convolution"])
    if expected is not None:
        assert program.operators[-1].kind.padding == expected


@pytest.mark.parametrize(
    ("border", "own", "merges"),
    [
        (((1, 1), (1, 1)), ((0, 0), (0, 0)), False),  # its windows see the border
        (((1, 1), (1, 1)), ((-1, -1), (-1, -1)), True),  # and here they do not
        (((2, 1), (0, 1)), ((-2, -2), (0, -1)), True),
        (((2, 0), (0, 0)), ((-1, 0), (0, 0)), False),
        (((0, 0), (0, 2)), ((0, 0), (0, -1)), False),
        (((0, 0), (0, 0)), ((1, 1), (1, 0)), True),
        (((-1, 0), (0, 0)), ((-1, 0), (0, 0)), False),
    ],
)
@pytest.mark.parametrize("op", [None, "max"])
def test_other_borders_go_where_no_window_sees_them(
    border: Pairs, own: Pairs, merges: bool, op: Any, rewritten: Any
) -> None:
    value = 3.0 if op is None else 0.0
    program = rewritten(FOLD, padded(border, own, value=value, op=op), torch.randn(1, 2, 7, 7))
    main = "Convolution" if op is None else "Pool"
    assert kinds_of(program) == ([main] if merges else ["Pad", main])
    if merges:
        expected = tuple((a + c, b + d) for (a, b), (c, d) in zip(border, own, strict=True))
        assert program.operators[-1].kind.padding == expected


def test_a_border_of_rows_or_channels_stays(rewritten: Any) -> None:
    weight = torch.randn(2, 4, 3, 3)
    for amounts in ((0, 0, 0, 0, 1, 0), (0, 0, 0, 0, 0, 1)):
        model = lambda x, amounts=amounts: conv2d(pad(x, amounts), weight)  # noqa: E731
        assert kinds_of(rewritten(FOLD, model, torch.randn(1, 3, 5, 5))) == ["Pad", "Convolution"]
    for amounts in ((0, 0, 0, 0, 0, 0, 1, 0), (0, 0, 0, 0, 0, 0, 0, 1)):
        model = lambda x, amounts=amounts: conv2d(pad(x, amounts), weight)  # noqa: E731
        assert kinds_of(rewritten(FOLD, model, torch.randn(1, 4, 5, 5))) == ["Pad", "Convolution"]


def test_a_border_that_others_read_is_still_taken_in(rewritten: Any) -> None:
    weight = torch.randn(2, 3, 3, 3)

    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = pad(x, (1, 1, 1, 1))
        return conv2d(wide, weight), wide

    program = rewritten(FOLD, model, torch.randn(1, 3, 5, 5))
    assert sorted(kinds_of(program)) == ["Convolution", "Pad"]
    (conv,) = (operator for operator in program.operators if isinstance(operator.kind, Convolution))
    assert conv.kind.padding == ((1, 1), (1, 1))


WEIGHT = torch.randn(2, 3, 3, 3)
CUT: dict[str, tuple[Any, list[str]]] = {
    "first row": (lambda x: conv2d(x, WEIGHT, padding=1)[:, :, 1:], ["Convolution"]),
    "last column": (lambda x: conv2d(x, WEIGHT, padding=1)[..., :-1], ["Convolution"]),
    "one row": (lambda x: conv2d(x, WEIGHT, padding=1, stride=2)[:, :, 2:3], ["Convolution"]),
    "dilated": (lambda x: conv2d(x, WEIGHT, padding=2, dilation=2)[:, :, 1:4], ["Convolution"]),
    "both": (lambda x: conv2d(x, WEIGHT, padding=1, stride=(1, 2))[:, :, 1:, 1:], ["Convolution"]),
    "max": (lambda x: max_pool2d(x, 3, 1, 1)[:, :, 2:], ["Pool"]),
    "max of even windows": (lambda x: max_pool2d(x, 2, 2)[:, :, 1:], ["Pool"]),
    "average": (lambda x: avg_pool2d(x, 2, 1)[..., 1:-1], ["Pool"]),
    "every other row": (lambda x: conv2d(x, WEIGHT, padding=1)[:, :, ::2], ["Convolution", "Slice"]),
    "channels": (lambda x: conv2d(x, WEIGHT, padding=1)[:, 1:], ["Convolution", "Slice"]),
    "images": (lambda x: conv2d(x, WEIGHT, padding=1)[1:], ["Convolution", "Slice"]),
    "nothing": (lambda x: conv2d(x, WEIGHT, padding=1)[:, :, 3:3], ["Convolution", "Slice"]),
    "of something else": (lambda x: x.exp()[:, :, 1:], ["Pointwise", "Slice"]),
    "of the input": (lambda x: x[:, :, 1:] * 2, ["Slice", "Pointwise"]),
}


@pytest.mark.parametrize("name", CUT)
def test_a_cut_becomes_padding(name: str, rewritten: Any) -> None:
    model, expected = CUT[name]
    program = rewritten(FOLD, model, torch.randn(2, 3, 8, 8))
    assert kinds_of(program) == expected


def test_a_result_that_others_read_is_not_cropped(rewritten: Any) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = conv2d(x, WEIGHT)
        return y[:, :, 1:] * 2, y

    assert kinds_of(rewritten(FOLD, model, torch.randn(1, 3, 6, 6))) == ["Convolution", "Slice", "Pointwise"]


@pytest.mark.parametrize(("has_residual", "expected"), [(False, ["main"]), (True, ["main", "cut"])])
def test_a_residual_would_have_to_be_cut_as_well(has_residual: bool, expected: list[str], rewritten: Any) -> None:
    shapes = [(1, 2, 5, 5), (2, 2, 1, 1), (1, 2, 5, 5), (1, 2, 5, 5), (1, 2, 4, 5)]
    kind = Convolution((1, 1), ((0, 0), (0, 0)), (1, 1), 1, False)
    kind = replace(kind, epilogue=Epilogue("relu", has_residual=has_residual))
    operators = (
        Operator("main", kind, (0, 1, 2) if has_residual else (0, 1), (3,)),
        Operator("cut", Slice(2, 1), (3,), (4,)),
    )
    values = tuple(ValueType(shape, "float32") for shape in shapes)
    inputs = (0, 2) if has_residual else (0,)
    program = Program(values, operators, inputs, (4,), {1: torch.randn(2, 2, 1, 1)})
    changed = rewritten(FOLD, program, *(torch.randn(1, 2, 5, 5) for _ in inputs))
    assert [operator.name for operator in changed.operators] == expected


amount = st.integers(-1, 2)


@settings(max_examples=60, derandomize=True)
@given(
    st.tuples(amount, amount, amount, amount),
    st.sampled_from(["conv", "max", "average"]),
    st.integers(1, 2),
    st.integers(0, 1),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
def test_any_border_and_any_cut_give_what_they_gave(
    border: tuple[int, ...], op: str, stride: int, own: int, cut: tuple[int, int]
) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        x = pad(x, border)
        if op == "conv":
            x = conv2d(x, WEIGHT, stride=stride, padding=own)
        else:
            x = (max_pool2d if op == "max" else avg_pool2d)(x, 3, stride, own)
        return x[:, :, cut[0] : x.shape[2] - cut[1]]

    x = torch.randn(1, 3, 11, 11)
    program = capture(run, (x,)).program
    changed = fold_borders(program)
    check_program(changed)
    torch.testing.assert_close(ReferenceExecutor(changed).run([x]), [run(x)], rtol=1e-4, atol=1e-5)
