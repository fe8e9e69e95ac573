"""Attention of training and its gradients beside torch's in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mlsys_nimble.backends.cpu.library import View
from mlsys_nimble.ir.operators import Aten, Input
from mlsys_nimble.ir.program import Operator
from mlsys_nimble.training import transformer
from mlsys_nimble.training.kernels import KernelList
from torch import Tensor

pytestmark = pytest.mark.usefixtures("kernel_level")

LANES = 16  # of the widest build; narrower ones take its multiples too
NAME = "aten._scaled_dot_product_flash_attention_for_cpu"
SHAPES = [
    (2, 3, 16, 16, 2 * LANES),
    (1, 2, 7, 13, LANES),
    (2, 1, 21, 5, 3 * LANES),
    (3, 2, 1, 1, LANES),
]  # N, H, L, S, D


def rows(n: int, h: int, length: int, d: int) -> Tensor:
    """Heads that lie side by side, as a model's do."""
    return torch.randn(length, n, h, d).permute(1, 2, 0, 3)


def operator(inputs: list[Tensor], *arguments: Any, **keywords: Any) -> Operator:
    name = f"{NAME}_backward.default" if len(inputs) == 6 else f"{NAME}.default"
    kind = Aten(name, (*map(Input, range(len(inputs))), *arguments), tuple(keywords.items()))
    return Operator("attention", kind, tuple(range(len(inputs))), (6, 7, 8))


def run(attention_operator: Operator, inputs: list[Tensor], shapes: list[torch.Size], num_threads: int) -> list[Tensor]:
    views = [View.of(tensor) for tensor in inputs]
    work = transformer.attention_of(attention_operator, views)
    assert work is not None
    strides = transformer.attention_strides(work, views)
    outputs = [
        torch.empty_strided(shape, step).fill_(float("nan")) for shape, step in zip(shapes, strides, strict=True)
    ]
    KernelList(transformer.attention_kernels(work, views, [View.of(tensor) for tensor in outputs]), num_threads).run()
    return outputs


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("is_causal", "scale"), [(False, None), (True, 0.3)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_they_compute_what_torch_does(shape: tuple[int, ...], is_causal: bool, scale: float | None, num_threads: int):
    torch.manual_seed(0)
    n, h, length, sources, d = shape
    q, k, v, dout = rows(n, h, length, d), rows(n, h, sources, d), rows(n, h, sources, d), rows(n, h, length, d)
    exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    scores = exact[0] @ exact[1].transpose(-1, -2) * (d**-0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones(length, sources).triu(1).bool(), float("-inf"))
    wanted = scores.softmax(-1) @ exact[2]
    forward = operator([q, k, v], 0.0, is_causal, scale=scale)
    out, logsumexp = run(forward, [q, k, v], [q.shape, q.shape[:3]], num_threads)
    torch.testing.assert_close(out.double(), wanted.detach(), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(logsumexp.double(), scores.logsumexp(-1).detach(), rtol=1e-5, atol=2e-6)
    inputs = [dout, q, k, v, out, logsumexp]
    made = run(operator(inputs, 0.0, is_causal, scale=scale), inputs, [q.shape, k.shape, v.shape], num_threads)
    for ours, theirs in zip(made, torch.autograd.grad(wanted, exact, dout.double()), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_others_are_torchs():
    def work_of(q: Tensor, *arguments: Any, **keywords: Any) -> object:
        return transformer.attention_of(operator([q, q, q], *arguments, **keywords), [View.of(q)] * 3)

    q = rows(2, 2, 8, LANES)
    assert work_of(q) == work_of(q, 0.0, False) == transformer.AttentionWork(False, False, None)
    assert work_of(q, 0.1, False) is None
    assert work_of(q.double()) is None
    assert work_of(rows(2, 2, 8, LANES + 1)) is None
    assert work_of(rows(1, 1, 512, LANES)) is None
    assert work_of(torch.randn(2, 2, LANES, 8).transpose(-1, -2)) is None
