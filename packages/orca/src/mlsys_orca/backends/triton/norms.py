"""RMSNorm and LayerNorm, each fused with the addition before it and the rounding after it.

One program per row, so a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl


@triton.jit
def _add_norm(
    x: tl.tensor,
    branch: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * SIZE
    i = tl.arange(0, BLOCK)
    is_in = i < SIZE
    state = tl.load(x + row + i, mask=is_in, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        state += tl.load(branch + row + i, mask=is_in, other=0.0).to(tl.float32)
        tl.store(x + row + i, state, mask=is_in)
    if IS_CENTRED:
        state = tl.where(is_in, state - tl.sum(state, 0) / SIZE, 0.0)
    result = state * tl.rsqrt(tl.sum(state * state, 0) / SIZE + eps)
    if HAS_WEIGHT:
        result *= tl.load(weight + i, mask=is_in, other=0.0)
    if HAS_BIAS:
        result += tl.load(bias + i, mask=is_in, other=0.0)
    tl.store(out + row + i, result.to(out.dtype.element_ty), mask=is_in)


def add_norm(
    x: Tensor,
    branch: Tensor | None,
    *,
    weight: Tensor | None,
    bias: Tensor | None = None,
    eps: float,
    is_centred: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Add ``branch`` to ``x``, where it stands, and normalise the sum.

    Args:
        x: [num_tokens, hidden_size] contiguous; fp32 and overwritten where there is a branch.
        branch: The same shape, contiguous, any floating dtype; None: nothing is added.
        weight: [hidden_size] fp32 that scales; None: no scale.
        bias: [hidden_size] fp32 that shifts; None: no shift.
        eps: Added to the mean square, or to the variance.
        is_centred: LayerNorm; False: RMSNorm.
        dtype: Dtype of the result.

    Returns:
        [num_tokens, hidden_size] in ``dtype``.
    """
    num_tokens, size = x.shape
    out = torch.empty(num_tokens, size, dtype=dtype, device=x.device)
    block = triton.next_power_of_2(size)
    _add_norm[num_tokens,](
        x,
        x if branch is None else branch,
        x if weight is None else weight,
        x if bias is None else bias,
        out,
        eps,
        SIZE=size,
        BLOCK=block,
        HAS_BRANCH=branch is not None,
        IS_CENTRED=is_centred,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        num_warps=min(max(block // 512, 1), 16),
    )
    return out
