"""Operators the model families share: everything but attention, so everything that takes the batch flattened.

Measured on SmolLM2-135M (2 Zen 5 cores, quiet, fp32 / bf16): a decoded token takes 34 / 15 ms with
``torch.nn.functional.linear`` and 18 / 12 ms with weights prepacked for oneDNN, a prefill of 256 tokens 560 / 106 and
160 / 103 ms; so :class:`Linear` prepacks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mlsys_orca.models.config import ModelConfig

_TYPICAL_ROWS = 64  # tokens in a batch; oneDNN picks its blocked layout for it, and any number of rows may follow


class Linear(nn.Module):
    """``x @ weight.T`` with a weight that never changes, prepacked into oneDNN's layout where there is one.

    Args:
        weight: [out_features, in_features]. On a CPU with oneDNN a packed copy is kept instead.

    Example:
        >>> Linear(torch.ones(3, 2))(torch.ones(1, 2)).tolist()
        [[2.0, 2.0, 2.0]]
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.is_packed = _can_pack(weight)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS) if self.is_packed else weight
        self.register_buffer("weight", packed, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [num_tokens, in_features] -> [num_tokens, out_features]."""
        if self.is_packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")
            return out
        return functional.linear(x, self.weight)  # type: ignore[arg-type]  # a buffer is Tensor | Module to mypy


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class RMSNorm(nn.Module):
    """Divides each row by its root mean square and scales it; fp32 in, the model's dtype out.

    Args:
        weight: [hidden_size] fp32.
        eps: Added to the mean square.
        dtype: What the next operator computes in.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, *, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.dtype = dtype
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [num_tokens, hidden_size] fp32 -> the same shape in the model's dtype."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps).to(self.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's product: ``gate_up`` [num_tokens, 2 * n], gates first -> [num_tokens, n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


class Rotary(nn.Module):
    """Rotary position embedding on head halves: feature i turns with feature i + head_dim / 2 (Su et al., 2021).

    That is the order of Hugging Face checkpoints; GGUF files hold the two features of a pair beside each other, and
    their q and k weights are put into this order when they are read, which costs nothing per token.
    """

    inverse_frequencies: Tensor

    def __init__(self, config: ModelConfig, *, device: torch.device) -> None:
        super().__init__()
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        frequencies = 1.0 / config.rope_theta**exponents
        if config.rope_divisors is not None:
            frequencies /= torch.tensor(config.rope_divisors, dtype=torch.float32)
        self.register_buffer("inverse_frequencies", frequencies.to(device), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Factors for :func:`rotate`: cosines and signed sines, each fp32 [num_tokens, 1, head_dim]."""
        angles = torch.outer(positions.float(), self.inverse_frequencies)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn ``x`` [num_tokens, heads, head_dim] by :class:`Rotary`'s factors; in fp32, cast back to ``x``'s dtype."""
    turned = torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
    return turned.to(x.dtype)
