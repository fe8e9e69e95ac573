"""A product's weight in the form that the native loops read: panels of 16 columns, input feature after feature."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mlsys_orca.models.layers import Linear
from mlsys_orca.native import library
from mlsys_orca.native.library import KINDS, PANEL

_KINDS = {torch.float32: KINDS.index("fp32"), torch.bfloat16: KINDS.index("bf16")}


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A packed weight and its bias. Owner: the native decoder, whose program points into the tensors."""

    kind: int
    depth: int  # input features
    codes: Tensor  # [panels, depth, 16]
    bias: Tensor | None  # fp32 [panels * 16]

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        return self.codes.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def matrix(self) -> library.Matrix:
        """The weight as the program takes it."""
        return library.Matrix(self.kind, len(self.codes) * PANEL, self.depth, 0, self.codes.data_ptr(), None, None)


def pack(linear: Linear, *, is_gated: bool) -> PackedLinear:
    """Take the weight of ``linear`` and pack it.

    Args:
        linear: Loses its weight.
        is_gated: Its columns are gates, then as many factors: panels of the two alternate.

    Raises:
        InvalidInputError: the weight was taken before.
    """
    bias = linear.bias
    weight = linear.take_weight().contiguous()
    halves = weight.chunk(2) if is_gated else (weight,)
    across = -(-halves[0].shape[0] // PANEL)  # panels of one half
    if not is_gated:
        across += across % 2  # the loops take two at a time
    codes = torch.empty(across * len(halves), weight.shape[1], PANEL, dtype=weight.dtype)
    native = library.load()
    native.orca_huge_pages(codes.data_ptr(), codes.nbytes)
    for number, half in enumerate(halves):
        columns, depth = half.shape
        native.orca_pack(
            half.data_ptr(), codes.data_ptr(), weight.itemsize, columns, depth, across, len(halves), number
        )
    return PackedLinear(_KINDS[weight.dtype], weight.shape[1], codes, _pack_bias(bias, across, is_gated))


def _pack_bias(bias: Tensor | None, across: int, is_gated: bool) -> Tensor | None:
    if bias is None:
        return None
    halves = bias.float().chunk(2) if is_gated else (bias.float(),)
    packed = torch.zeros(across, len(halves), PANEL)
    for number, half in enumerate(halves):
        padded = torch.zeros(across * PANEL)
        padded[: len(half)] = half
        packed[:, number] = padded.view(across, PANEL)
    return packed.flatten()
