"""Layers whose feed-forward parts a registered compiler has made, for models that run in torch's operators.

A compiler wants fixed shapes, and iterations have as many rows as tokens. Those of decodes are few: one for each
request of a batch. So the parts that compute each row by itself are compiled for 1, 2, 4, ... rows up to a full batch;
a batch between two sizes is padded with rows of zeros. Larger ones (prompts) run as they are, and so does attention,
which reads the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_core.plugins.loading import Compiler
from mlsys_orca.model.blocks import MLP, Decoder, GatedMLP
from mlsys_orca.model.decoder import DecoderModel
from mlsys_orca.model.layers import Linear
from torch import Tensor, nn


def compile_decodes(model: DecoderModel, compiler: Compiler, max_batch_size: int) -> DecoderModel:
    """Have ``compiler`` make the feed-forward parts of ``model``, in place, for batches of decodes.

    Raises:
        InvalidInputError: the model does not run in torch's operators, or has no such parts in floating point.
    """
    if not isinstance(model, Decoder):
        raise InvalidInputError(
            f"a compiler is for models that run layer by layer in torch's operators; this is a {type(model).__name__}"
        )
    sizes = [1 << power for power in range((max_batch_size - 1).bit_length() + 1)]
    num_compiled = 0
    for layer in model.layers:
        part = getattr(layer, "mlp", None)
        if isinstance(part, MLP | GatedMLP) and all(_is_plain(linear) for linear in _linears(part)):
            layer.mlp = CompiledRows(part, compiler, sizes, device=model.device, dtype=model.dtype)
            num_compiled += 1
    if not num_compiled:
        raise InvalidInputError("no layer of this model has a feed-forward part in floating point to compile")
    return model


class CompiledRows(nn.Module):
    """A module of rows, compiled for some numbers of them.

    Args:
        part: Computes each row by itself, [num_rows, hidden_size] to the same shape.
        compiler: Makes a callable of a module and an example.
        sizes: Numbers of rows, rising.
        device: Device of the rows.
        dtype: Dtype of the rows.
    """

    def __init__(
        self, part: MLP | GatedMLP, compiler: Compiler, sizes: list[int], *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.part = part
        plain, width = _plain(part), _linears(part)[0].in_features
        with torch.no_grad():
            self._compiled: dict[int, Callable[..., Any]] = {
                size: compiler(plain, (torch.zeros(size, width, dtype=dtype, device=device),)) for size in sizes
            }

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``x`` [num_rows, hidden_size] -> the same shape."""
        num_rows = len(x)
        size = next((size for size in self._compiled if size >= num_rows), None)
        if size is None:
            larger: Tensor = self.part(x)
            return larger
        if size > num_rows:
            x = torch.cat([x, x.new_zeros(size - num_rows, x.shape[1])])
        out: Tensor = self._compiled[size](x)
        return out[:num_rows].clone()  # a compiled callable may use its outputs again


def _linears(part: MLP | GatedMLP) -> list[Linear]:
    return [part.up if isinstance(part, MLP) else part.gate_up, part.down]


def _is_plain(linear: Linear) -> bool:
    return isinstance(linear.weight, Tensor) and not linear.is_packed


def _plain(part: MLP | GatedMLP) -> nn.Module:
    """Return the same part over the same weights, whose products stay as they are: a packed weight cannot be traced."""
    first, down = (Linear(linear.weight, linear.bias, packs=False) for linear in _linears(part))
    kind = MLP if isinstance(part, MLP) else GatedMLP
    return kind(first, down, activation=part.activation_name).eval()
