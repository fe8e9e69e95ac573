"""Operators the model families share: everything but attention, so everything that takes the batch flattened.

Measured on SmolLM2-135M (2 Zen 5 cores, quiet, fp32 / bf16): a decoded token takes 34 / 15 ms with
``torch.nn.functional.linear`` and 18 / 12 ms with weights prepacked for oneDNN, a prefill of 256 tokens 560 / 106 and
160 / 103 ms; so :class:`Linear` prepacks. That is for where :mod:`mlsys_orca.backends.native` does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.embedding import set_matrix
from mlsys_orca.model.weights.quantized import Matrix, QuantizedMatrix, product
from torch import Tensor, nn
from torch.nn import functional

_TYPICAL_ROWS = 64  # tokens in a batch; oneDNN picks its blocked layout for it, and any number of rows may follow

# By the names of ModelConfig.activation.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


class Linear(nn.Module):
    """``x @ weight.T + bias`` with a weight that never changes, prepacked into oneDNN's layout where there is one.

    Args:
        weight: [out_features, in_features]. On a CPU with oneDNN a packed copy of a floating one takes its place when
            it is first used; a quantised one stays as it is.
        bias: [out_features], of the dtype that goes in.
        packs: False: the weight stays as it is.

    Example:
        >>> Linear(torch.ones(3, 2))(torch.ones(1, 2)).tolist()
        [[2.0, 2.0, 2.0]]
    """

    bias: Tensor | None
    weight: Matrix

    def __init__(self, weight: Matrix, bias: Tensor | None = None, *, packs: bool = True) -> None:
        super().__init__()
        self.packs = packs
        self.out_features, self.in_features = weight.shape
        self.is_packed = False
        set_matrix(self, "weight", weight)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: ``x`` [num_tokens, in_features] -> [num_tokens, out_features]."""
        if isinstance(self.weight, QuantizedMatrix):
            return product(x, self.weight, self.bias)
        if not self.is_packed:
            if not (self.packs and _can_pack(self.weight)):
                return functional.linear(x, self.weight, self.bias)
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, _TYPICAL_ROWS)
            self.is_packed = True
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out

    def take_weight(self) -> Matrix:
        """Take the weight [out_features, in_features] to keep it in another form; this product cannot run any more.

        Raises:
            InvalidInputError: it has been packed or taken.
        """
        weight = self.weight
        if self.is_packed or (isinstance(weight, Tensor) and weight.numel() == 0):
            raise InvalidInputError("the weight of this product is packed or taken already: load the model anew")
        self.weight = torch.empty(0)
        return weight


class StackedLinear(Linear):
    """Products of one input whose results stand beside each other: of matrices too unlike to be one.

    Args:
        parts: One :class:`Linear` or more, of equal in_features.
    """

    def __init__(self, parts: Iterable[Linear]) -> None:
        products = list(parts)
        super().__init__(torch.empty(0, products[0].in_features))
        self.parts = nn.ModuleList(products)
        self.out_features = sum(part.out_features for part in products)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: ``x`` [num_tokens, in_features] -> [num_tokens, out_features]."""
        return torch.cat([part(x) for part in self.parts], dim=-1)


def has_packed_weights(model: object) -> bool:
    """Return whether some product of ``model`` has a quantised weight."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return any(isinstance(module, Linear) and isinstance(module.weight, QuantizedMatrix) for module in modules)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class RMSNorm(nn.Module):
    """Divides each row by its root mean square and scales it; fp32 in, the model's dtype out.

    Args:
        weight: [hidden_size] fp32; or [heads, head_dim], for rows of heads that are normalised each by itself.
        eps: Added to the mean square.
        dtype: Dtype in which the next operator computes.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, *, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.dtype = dtype
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [num_tokens, then the weight's shape] -> same shape in the model's dtype."""
        if self.weight.ndim == 1:
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps).to(self.dtype)
        return (functional.rms_norm(x.float(), x.shape[-1:], None, self.eps) * self.weight).to(self.dtype)


class LayerNorm(nn.Module):
    """Centres each row, divides it by its deviation, scales and shifts it; fp32 in.

    Args:
        weight: [hidden_size] fp32; [heads, head_dim] for heads that are normalised each by itself.
        bias: As ``weight``; None: no shift.
        eps: Added to the variance.
        dtype: Dtype in which the next operator computes.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, *, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.hidden_size = weight.shape[-1]
        self.eps = eps
        self.dtype = dtype
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [num_tokens, then the weight's shape] fp32 -> same shape in ``dtype``."""
        if self.weight.ndim == 1:
            return functional.layer_norm(x, (self.hidden_size,), self.weight, self.bias, self.eps).to(self.dtype)
        scaled = functional.layer_norm(x.float(), (self.hidden_size,), None, None, self.eps) * self.weight
        return (scaled if self.bias is None else scaled + self.bias).to(self.dtype)


class Rotary(nn.Module):
    """Rotary position embedding on halves: feature i turns with feature i + rotary_dim / 2 (Su et al., 2021).

    That is the order of Hugging Face checkpoints. Llama's GGUF files hold the two features of a pair beside each other,
    and their q and k weights are put into this order when they are read, which costs nothing per token.
    """

    inverse_frequencies: Tensor

    def __init__(self, config: ModelConfig, *, device: torch.device) -> None:
        super().__init__()
        rotary_dim = config.rotary_dim or config.head_dim
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        wavelengths = config.rope_theta**exponents
        if config.rope_divisors is not None:
            wavelengths *= torch.tensor(config.rope_divisors, dtype=torch.float32)
        frequencies = 1.0 / wavelengths
        self.amplitude = config.rope_amplitude
        self.register_buffer("inverse_frequencies", frequencies.to(device), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return factors for :func:`rotate`: cosines and signed sines, each fp32 [num_tokens, 1, rotary_dim]."""
        angles = torch.outer(positions.float(), self.inverse_frequencies)
        cos, sin = angles.cos(), angles.sin()
        if self.amplitude != 1:
            cos, sin = cos * self.amplitude, sin * self.amplitude
        return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]


class Rotaries(nn.Module):
    """Several rotary embeddings of one decoder; each attention says which turns its heads."""

    def __init__(self, rotaries: Iterable[Rotary]) -> None:
        super().__init__()
        self.rotaries = nn.ModuleList(rotaries)

    def forward(self, positions: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return the factors of each :class:`Rotary` for ``positions`` [num_tokens] int64."""
        return tuple(rotary(positions) for rotary in self.rotaries)


def halves_of_pairs(rows: Tensor, *, head_dim: int, rotary_dim: int | None = None) -> Tensor:
    """Reorder rows of heads from rotary pairs beside each other to the halves that :class:`Rotary` takes.

    Args:
        rows: [heads * head_dim, ...].
        head_dim: Features of a head.
        rotary_dim: Leading ones that turn; None: all.

    Example:
        >>> halves_of_pairs(torch.arange(6), head_dim=6, rotary_dim=4).tolist()
        [0, 2, 1, 3, 4, 5]
    """
    heads = rows.view(-1, head_dim, *rows.shape[1:])
    turned, rest = heads[:, : rotary_dim or head_dim], heads[:, rotary_dim or head_dim :]
    pairs = turned.reshape(len(heads), -1, 2, *rows.shape[1:]).transpose(1, 2).flatten(1, 2)
    return torch.cat([pairs, rest], dim=1).reshape(rows.shape)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the leading features of ``x`` [num_tokens, heads, head_dim] by :class:`Rotary`'s factors, in fp32.

    Returns:
        The same shape and dtype; features beyond the factors' width stay as they are.
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]), dim=-1)
    rotated = torch.addcmul(x * cos, x.roll(rotary_dim // 2, dims=-1), sin)
    return rotated.to(x.dtype)
