"""Attention written by hand: which products, scales and masks are one, with which scale, and which are not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from mlsys_nimble.ir.operators import Attention, MatMul, Permute, Softmax
from mlsys_nimble.ir.program import Operator, Program, ValueType
from mlsys_nimble.passes.constants import remove_dead_code
from mlsys_nimble.passes.detection import find_attention
from mlsys_nimble.passes.folding import fold_affine
from mlsys_nimble.passes.fusion import fuse_elementwise
from mlsys_nimble.passes.views import simplify_views
from torch import Tensor

FIND = (find_attention, simplify_views, remove_dead_code)
ARGS = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 6, 4), torch.randn(2, 3, 6, 7), torch.randn(2, 1, 1, 6)


def product(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1)


SCALED: dict[str, tuple[Any, float]] = {
    "none": (lambda s, m: s, 1.0),
    "product": (lambda s, m: s * 0.25, 0.25),
    "quotient": (lambda s, m: s / 4, 0.25),
    "both": (lambda s, m: s * 3 / 4, 0.75),
    "two products": (lambda s, m: s * 3 * 5, 15.0),
    "two quotients": (lambda s, m: s / 2 / 5, 0.1),
    "mask": (lambda s, m: s + m, 1.0),
    "mask first": (lambda s, m: m + s, 1.0),
    "scale and mask": (lambda s, m: s / 4 + m, 0.25),
    "mask and scale": (lambda s, m: m + s * 2, 2.0),
}


@pytest.mark.parametrize("name", SCALED)
def test_scales_multiply_and_one_mask_is_added(name: str, rewritten: Any) -> None:
    scores, scale = SCALED[name]
    program = rewritten(FIND, lambda q, k, v, m: scores(product(q, k), m).softmax(-1) @ v, *ARGS)
    (operator,) = program.operators
    has_mask = "mask" in name
    assert operator.kind == Attention(pytest.approx(scale), is_causal=False, has_mask=has_mask, has_zero_rows=False)
    assert operator.inputs == ((0, 1, 2, 3) if has_mask else (0, 1, 2))


def test_a_scale_that_is_in_the_product_already_counts(rewritten: Any) -> None:
    passes = (fold_affine, *FIND)
    program = rewritten(passes, lambda q, k, v, m: (product(q, k) / 4 * 3 + m).softmax(-1) @ v, *ARGS)
    assert [operator.kind.scale for operator in program.operators] == [0.75]


NOT: dict[str, Any] = {
    "a mask that is scaled too": lambda q, k, v, m: ((product(q, k) + m) / 4).softmax(-1) @ v,
    "two masks": lambda q, k, v, m: (product(q, k) + m + m.exp()).softmax(-1) @ v,
    "the scores twice": lambda q, k, v, m: ((s := product(q, k)) + s).softmax(-1) @ v,
    "squared": lambda q, k, v, m: ((s := product(q, k)) * s).softmax(-1) @ v,
    "a number added": lambda q, k, v, m: (product(q, k) + 3).softmax(-1) @ v,
    "a factor of its own for each key": lambda q, k, v, m: (product(q, k) * m).softmax(-1) @ v,
    "a number over it": lambda q, k, v, m: (3 / product(q, k)).softmax(-1) @ v,
    "a difference": lambda q, k, v, m: (product(q, k) - m).softmax(-1) @ v,
    "a mask less the scores": lambda q, k, v, m: (m - product(q, k)).softmax(-1) @ v,
    "another function": lambda q, k, v, m: product(q, k).tanh().softmax(-1) @ v,
    "over the queries": lambda q, k, v, m: product(q, k).softmax(-2) @ v,
    "logarithms": lambda q, k, v, m: product(q, k).log_softmax(-1) @ v,
    "no product": lambda q, k, v, m: (q.sum(-1, keepdim=True) * m).softmax(-1) @ v,
    "scores turned round": lambda q, k, v, m: product(k, q).transpose(-2, -1).softmax(-1) @ v,
    "three dims": lambda q, k, v, m: product(q[0], k[0]).softmax(-1) @ v[0],
    "products on both sides": lambda q, k, v, m: (product(q, k) + product(q.exp(), k)).softmax(-1) @ v,
    "a mask that adds dims": lambda q, k, v, m: (product(q[:1], k[:1]) + m).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", NOT)
def test_operators_that_are_no_attention_stay(name: str, rewritten: Any) -> None:
    kinds = Counter(type(operator.kind) for operator in rewritten(FIND, NOT[name], *ARGS).operators)
    assert kinds[Attention] == 0
    assert kinds[Softmax] == 1


def test_weights_that_are_also_a_result_stay(rewritten: Any) -> None:
    def weights(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = (product(q, k) + m).softmax(-1)
        return probabilities @ v, probabilities

    def scores(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        s = product(q, k)
        return (s + m).softmax(-1) @ v, s

    def scaled(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        s = product(q, k) / 4
        return (s + m).softmax(-1) @ v, s

    for model in (weights, scores, scaled):
        kinds = Counter(type(operator.kind) for operator in rewritten(FIND, model, *ARGS).operators)
        assert kinds[Attention] == 0


def test_others_before_and_between_do_not_stop_the_search(rewritten: Any) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        q = q @ torch.ones(2, 3, 4, 4)  # a product of no weights
        first = product(q, k).softmax(-1) @ v
        other = (q.exp() @ k.transpose(-2, -1)).softmax(-2) @ v
        flat = product(q[0], k[0]).softmax(-1) @ v[0]
        cube = (product(q, k).tanh()).softmax(-1) @ v
        return first + other + flat + cube + (product(q.sin(), k) / 3 + m).softmax(-1) @ v

    kinds = Counter(type(operator.kind) for operator in rewritten(FIND, model, *ARGS).operators)
    assert kinds[Attention] == 2


def test_a_product_with_a_factor_of_its_own_stays(rewritten: Any) -> None:
    model = lambda q, k, v, m: (product(q, k).softmax(-1) @ v) * 0.5  # noqa: E731
    kinds = Counter(type(operator.kind) for operator in rewritten((fold_affine, *FIND), model, *ARGS).operators)
    assert kinds[Attention] == 0, "its factor would be lost"
    model = lambda q, k, v, m: product(q, k).softmax(-1) @ v * 0.5  # noqa: E731
    kinds = Counter(type(operator.kind) for operator in rewritten((*FIND, fold_affine), model, *ARGS).operators)
    assert kinds[Attention] == 1


def test_without_keys_there_is_nothing_to_attend_to(rewritten: Any) -> None:
    for num_keys in (0, 1):
        args = torch.randn(2, 2, 3, 4), torch.randn(2, 2, num_keys, 4), torch.randn(2, 2, num_keys, 5), torch.randn(2)
        program = rewritten(FIND, lambda q, k, v, m: product(q, k).softmax(-1) @ v, *args)
        assert any(isinstance(operator.kind, Attention) for operator in program.operators) == num_keys


def test_steps_that_are_one_operator_already_are_not_taken_apart(rewritten: Any) -> None:
    model = lambda q, k, v, m: (product(q, k) / 4 + m).softmax(-1) @ v  # noqa: E731
    program = rewritten((fuse_elementwise, *FIND), model, *ARGS)
    assert not any(isinstance(operator.kind, Attention) for operator in program.operators)


def test_keys_are_swapped_back_by_a_permutation_of_the_right_type() -> None:
    """Keys [B, H, D, S] of a MatMul become [B, H, S, D] of an attention."""
    shapes = {0: (2, 3, 5, 4), 1: (2, 3, 4, 6), 2: (2, 3, 6, 7), 3: (2, 3, 5, 6), 4: (2, 3, 5, 6), 5: (2, 3, 5, 7)}
    operators = (
        Operator("scores", MatMul(), (0, 1), (3,)),
        Operator("weights", Softmax(3), (3,), (4,)),
        Operator("mixed", MatMul(), (4, 2), (5,)),
    )
    values = tuple(ValueType(shape, "float32") for shape in shapes.values())
    keys, attention = find_attention(Program(values, operators, (0, 1, 2), (5,))).operators
    assert (keys.name, keys.kind, keys.inputs) == ("mixed.keys", Permute((0, 1, 3, 2)), (1,))
    changed = find_attention(Program(values, operators, (0, 1, 2), (5,)))
    assert changed.values[keys.outputs[0]] == ValueType((2, 3, 6, 4), "float32")
    assert (attention.name, attention.inputs) == ("mixed", (0, keys.outputs[0], 2))
