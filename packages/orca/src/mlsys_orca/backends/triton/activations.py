"""Kernels between an MLP's two products: the activation, and the gate where there is one, in one kernel.

The first product's bias is no part of it: cuBLAS adds that while it still has the sums in registers.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

_BLOCK = 1024  # features per program


@triton.jit
def _activate(x: tl.tensor, NAME: tl.constexpr) -> tl.tensor:
    """Return the activation of ``x`` fp32, by the names of ``layers.ACTIVATIONS``."""
    if NAME == "silu":
        return x * tl.sigmoid(x)
    elif NAME == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_tanh":  # 0.5 (1 + tanh(y)) is sigmoid(2 y)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(NAME == "relu")
        return tl.maximum(x, 0.0)


@triton.jit
def _plain(x: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, NAME: tl.constexpr) -> None:
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = x + tl.program_id(0).to(tl.int64) * SIZE + i
    state = tl.load(at, mask=i < SIZE, other=0.0).to(tl.float32)
    tl.store(at, _activate(state, NAME).to(x.dtype.element_ty), mask=i < SIZE)


@triton.jit
def _gated(x: tl.tensor, out: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, NAME: tl.constexpr) -> None:
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * SIZE + SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + i, (_activate(gate, NAME) * up).to(out.dtype.element_ty), mask=i < SIZE)


def activate(x: Tensor, *, activation: str) -> Tensor:
    """Replace ``x`` by ``activation(x)`` in place.

    Args:
        x: [num_tokens, intermediate_size] contiguous; overwritten.
        activation: A name of ``layers.ACTIVATIONS``.

    Returns:
        ``x``.
    """
    num_tokens, size = x.shape
    _plain[num_tokens, triton.cdiv(size, _BLOCK)](x, SIZE=size, BLOCK=_BLOCK, NAME=activation)
    return x


def gated(gate_up: Tensor, *, activation: str) -> Tensor:
    """Return ``activation(gate) * up``, rounded once.

    Args:
        gate_up: [num_tokens, 2 * intermediate_size] contiguous, gates first.
        activation: A name of ``layers.ACTIVATIONS``.

    Returns:
        [num_tokens, intermediate_size].
    """
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    _gated[num_tokens, triton.cdiv(size, _BLOCK)](gate_up, out, SIZE=size, BLOCK=_BLOCK, NAME=activation)
    return out
