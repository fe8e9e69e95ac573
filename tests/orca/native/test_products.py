from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mlsys_core.native import Struct, new
from mlsys_orca.backends.native import library
from mlsys_orca.backends.native.packing import pack
from mlsys_orca.model.layers import ACTIVATIONS, Linear
from mlsys_orca.model.slices import add_in_tree
from mlsys_orca.model.weights.quantized import QuantizedMatrix, pack_nibbles
from torch import Tensor
from torch.nn import functional

Run = Callable[..., Tensor]
KINDS = ["fp32", "bf16", "bf16-pairs", "int8", "int4", "int4-offsets", "int8-halves"]
ROUNDED = ["int8-rounded", "int4-rounded", "int4-offsets-rounded"]  # to bf16, where pairs of it are multiplied
ROWS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 40, 97)


class Quantized(Linear):
    """A product of a quantised matrix, as the loaders make them."""

    def __init__(self, matrix: QuantizedMatrix, bias: Tensor | None) -> None:
        super().__init__(matrix.dequantized(), bias)
        self.matrix = matrix

    def take_weight(self) -> Any:
        return self.matrix


def linear_of(kind: str, columns: int, depth: int, *, bias: bool = True) -> tuple[Linear, Tensor, Tensor | None]:
    """A product of that kind, its weight in fp32, and its bias."""
    torch.manual_seed(columns * 1000 + depth)
    shift = torch.randn(columns) if bias else None
    if kind.startswith("int"):
        scales = torch.rand(columns, depth // 16) * 0.02 + 0.01
        if "halves" in kind:
            scales = scales.half()
        codes = torch.randint(-127, 128, (columns, depth), dtype=torch.int8)
        if kind.startswith("int4"):
            codes = pack_nibbles(torch.randint(0, 16, (columns, depth), dtype=torch.uint8))
        offsets = torch.randn_like(scales) * 0.1 if "offsets" in kind else None
        matrix = QuantizedMatrix(codes=codes, scales=scales, offsets=offsets)
        return Quantized(matrix, shift), matrix.dequantized(), shift
    weight = torch.randn(columns, depth)
    if kind.startswith("bf16"):
        weight = weight.bfloat16()
    return Linear(weight, shift), weight.float(), shift


def product_of(
    linear: Linear, *, is_gated: bool = False, in_pairs: bool = False, takes_bf16: bool = False, **fields: Any
) -> tuple[Struct, Any]:
    """The operator, and what must outlive it."""
    packed = pack(linear, is_gated=is_gated, in_pairs=in_pairs, takes_bf16=takes_bf16)
    given = {
        "norm": None,
        "activation": "identity",
        "accumulates": False,
        "num_slices": 1,
        "is_partial": False,
        "column": 0,
        "limit": 0.0,
        "slope": 0.0,
        **fields,
    }
    registers = {"source": 0, "target": 1, "is_gated": is_gated}
    registers["num_columns"] = linear.out_features // (2 if is_gated else 1)
    gemm = library.load().structs["Gemm"]
    return new(gemm, matrix=packed.matrix(), bias=library.address(packed.bias), **registers, **given), packed


@pytest.mark.parametrize("kind", [*KINDS, *ROUNDED])
@pytest.mark.parametrize(("columns", "depth"), [(1, 16), (33, 48), (64, 400), (70, 1040), (40, 1088)])
def test_a_product_is_torchs_whatever_the_rows(native: Any, run: Run, kind: str, columns: int, depth: int) -> None:
    linear, weight, bias = linear_of(kind, columns, depth)
    is_rounded = kind in ROUNDED
    product, _held = product_of(linear, in_pairs=kind == "bf16-pairs", takes_bf16=is_rounded)
    states = torch.randn(max(ROWS), depth)
    if kind == "bf16-pairs" or is_rounded:
        states = states.bfloat16().float()  # it rounds them itself
    expected = functional.linear(states.double(), weight.double(), None if bias is None else bias.double())
    whole = run(native, product, states, columns, threads=2)
    exactness = 4e-3 if is_rounded else 1e-5  # weights, too, to 8 bits
    assert torch.allclose(whole.double(), expected, rtol=1e-5, atol=exactness * depth**0.5 * weight.abs().max())
    for rows in ROWS:
        for first in (0, max(ROWS) - rows):
            part = states[first : first + rows].clone()
            some = run(native, product, part, columns, threads=1)
            assert torch.equal(some, whole[first : first + rows]), (rows, first)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("is_gated", [False, True])
def test_bias_activation_gate_and_sum(native: Any, run: Run, activation: str | None, is_gated: bool) -> None:
    if is_gated and activation is None:
        pytest.skip("a gate has an activation")
    linear, weight, bias = linear_of("fp32", 72, 32)
    product, _held = product_of(linear, is_gated=is_gated, activation=activation or "identity")
    states = torch.randn(9, 32) * 0.7
    out = functional.linear(states, weight, bias)
    act = ACTIVATIONS[activation] if activation else lambda x: x
    expected = act(out[:, :36]) * out[:, 36:] if is_gated else act(out)
    assert torch.allclose(run(native, product, states, expected.shape[1], threads=2), expected, rtol=1e-5, atol=2e-5)


def test_a_product_can_add_to_its_target_and_normalise_its_source(native: Any, run: Run) -> None:
    _, weight, _ = linear_of("fp32", 40, 40, bias=False)
    scale, shift = torch.rand(40) + 0.5, torch.randn(40)
    norms = {
        "rms_norm": (None, functional.rms_norm),
        "layer_norm": (shift.data_ptr(), functional.layer_norm),
    }
    for kind, (shifts, torchs) in norms.items():
        norm = {"kind": kind, "size": 40, "eps": 1e-5, "weight": scale.data_ptr(), "bias": shifts}
        product, _held = product_of(linear_of("fp32", 40, 40, bias=False)[0], norm=norm, accumulates=True)
        product.target = 0
        for rows in (1, 3, 30):
            states = torch.randn(rows, 40)
            weights = (scale,) if kind == "rms_norm" else (scale, shift)
            expected = states + functional.linear(torchs(states, (40,), *weights, eps=1e-5), weight)
            run(native, product, states, 40, threads=2)
            assert torch.allclose(states, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", ["fp32", "bf16-pairs", "int4-rounded"])
def test_the_first_of_the_largest_logits_is_found_on_the_way(native: Any, run: Run, kind: str, threads: int) -> None:
    linear, weight, _ = linear_of(kind.removesuffix("-rounded"), 90, 64, bias=False)
    if not kind.startswith("int"):
        weight[70:] = weight[:20]  # the same logits again
        linear = Linear(weight.bfloat16() if kind.startswith("bf16") else weight, None)
    product, _held = product_of(linear, in_pairs=kind == "bf16-pairs", takes_bf16=kind in ROUNDED)
    states = torch.randn(75, 64)
    states[3] = 0.0  # all logits are equal
    largest = np.full(75, -1)
    logits = run(native, product, states, 90, threads=threads, largest=largest)
    assert largest.tolist() == logits.numpy().argmax(-1).tolist()
    assert largest[3] == 0


@pytest.mark.parametrize("kind", [*KINDS, *ROUNDED])
@pytest.mark.parametrize("slices", [2, 3, 4])
def test_slices_are_summed_apart_and_added_in_one_tree(native: Any, run: Run, kind: str, slices: int) -> None:
    columns, depth = 70, 96 * slices
    linear, _, bias = linear_of(kind, columns, depth)
    matrix = linear.take_weight()
    options = {"in_pairs": kind == "bf16-pairs", "takes_bf16": kind in ROUNDED}

    def features(start: int, stop: int) -> Linear:
        """The part of the product that a rank with these features has."""
        if isinstance(matrix, QuantizedMatrix):
            size, width = matrix.group_size, 8 // matrix.bits
            groups, codes = slice(start // size, stop // size), slice(start // width, stop // width)
            offsets = None if matrix.offsets is None else matrix.offsets[:, groups].contiguous()
            part = QuantizedMatrix(
                codes=matrix.codes[:, codes].contiguous(), scales=matrix.scales[:, groups].contiguous(), offsets=offsets
            )
            return Quantized(part, None)
        return Linear(matrix[:, start:stop].contiguous(), None)

    states = torch.randn(97, depth)
    for ranks in {1, 2, slices} - ({2} if slices % 2 else set()):
        own, sums = depth // ranks, []
        for rank in range(ranks):
            part = features(rank * own, (rank + 1) * own)
            product, _held = product_of(part, num_slices=slices // ranks, **options)
            few = states[:, rank * own : (rank + 1) * own].contiguous()
            sums.append(run(native, product, few, columns, threads=2))
            for rows in (1, 3, 13):
                assert torch.equal(run(native, product, few[:rows].clone(), columns, threads=1), sums[-1][:rows])
        found = add_in_tree(sums, torch.add) + bias
        if ranks == 1:
            whole = found
        assert torch.equal(found, whole), ranks


def test_a_products_slices_are_its_sum_but_for_rounding(native: Any, run: Run) -> None:
    linear, weight, bias = linear_of("fp32", 33, 288)
    product, _held = product_of(linear, num_slices=3)
    states = torch.randn(40, 288)
    expected = functional.linear(states.double(), weight.double(), None if bias is None else bias.double())
    assert torch.allclose(run(native, product, states, 33, threads=2).double(), expected, rtol=1e-5, atol=1e-4)
