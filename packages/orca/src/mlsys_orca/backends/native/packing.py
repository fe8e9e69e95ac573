"""A linear's weight in the form that the native loops read: panels of 16 columns, input feature after feature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from mlsys_core.memory.pages import advise_huge_pages
from mlsys_orca.backends.native import library
from mlsys_orca.backends.native.library import PANEL, address
from mlsys_orca.model.layers import Linear
from mlsys_orca.model.weights.quantized import QuantizedMatrix
from torch import Tensor

Activations = Literal["int8", "float"]  # the form in which rows meet packed codes
ACTIVATIONS: Activations = "float"  # where nothing else is asked for

_KINDS = {torch.float32: "f32", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A packed weight and its bias. Owner: the native decoder, whose program points into the tensors."""

    kind: str  # weights.h: Kind
    k: int  # input features
    # [panels, K, 16]; 4-bit codes: [panels, K / 2, 16]; int32: bf16 pairs [panels, K / 2, 16], quads of codes [panels,
    # K / 4 or, of 4 bits, K / 8, 16].
    codes: Tensor
    bias: Tensor | None  # fp32 [panels * 16]
    scales: Tensor | None = None  # fp16 or fp32 [panels, groups, 16]
    offsets: Tensor | None = None  # as scales
    takes_bf16: bool = False  # rows and decoded codes may be rounded to bf16
    centre: int = 0  # is subtracted from 4-bit codes in quads

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        return sum(part.nbytes for part in (self.codes, self.bias, self.scales, self.offsets) if part is not None)

    @property
    def is_integer(self) -> bool:
        """True if rows are quantised for it, so that whole numbers are multiplied."""
        return self.kind.endswith("_quads")

    def matrix(self) -> dict[str, Any]:
        """Return the fields of the native program's ``Matrix``."""
        group_size, has_halves = 0, False
        if self.scales is not None:
            group_size, has_halves = self.k // self.scales.shape[1], self.scales.dtype == torch.float16
        return {
            "kind": self.kind,
            "N": len(self.codes) * PANEL,
            "K": self.k,
            "group_size": group_size,
            "codes": address(self.codes),
            "scales": address(self.scales),
            "offsets": address(self.offsets),
            "has_halves": has_halves,
            "takes_bf16": self.takes_bf16,
            "centre": self.centre,
        }


def pack(
    linear: Linear,
    *,
    is_gated: bool,
    in_pairs: bool | None = None,
    takes_bf16: bool = False,
    activations: Activations = "float",
) -> PackedLinear:
    """Take the weight of ``linear`` and pack it.

    Args:
        linear: Loses its weight.
        is_gated: Its columns are gates, then as many factors: panels of the two alternate.
        in_pairs: bf16 in pairs, for machines that multiply them so; None: where this machine does.
        takes_bf16: For codes: where the processor multiplies pairs of bf16, rows and decoded weights are rounded.
        activations: For codes: ``"int8"``: rows are quantised too, and whole numbers are multiplied.

    Raises:
        InvalidInputError: the weight was taken before.
    """
    packed_bias, weight = pack_bias(linear, is_gated=is_gated), linear.take_weight()
    if isinstance(weight, QuantizedMatrix) and activations == "int8":
        return _pack_quads(weight, packed_bias, is_gated=is_gated)
    if isinstance(weight, QuantizedMatrix):
        kind = "int8" if weight.bits == 8 else "int4"
        parts = [_pack_rows(part, is_gated) for part in (weight.codes, weight.scales)]
        offsets = None if weight.offsets is None else _pack_rows(weight.offsets, is_gated)
        return PackedLinear(kind, weight.in_features, parts[0], packed_bias, parts[1], offsets, takes_bf16)
    k = weight.shape[1]
    if in_pairs is None:
        in_pairs = bool(library.load().orca_has_pairs())
    if in_pairs and weight.dtype == torch.bfloat16 and k % 2 == 0:
        pairs = weight.contiguous().view(torch.int32)
        return PackedLinear("bf16_pairs", k, _pack_rows(pairs, is_gated), packed_bias)
    return PackedLinear(_KINDS[weight.dtype], k, _pack_rows(weight, is_gated), packed_bias)


def _pack_quads(weight: QuantizedMatrix, bias: Tensor | None, *, is_gated: bool) -> PackedLinear:
    """Pack codes for products of whole numbers: the bytes of four neighbouring features stand together."""
    scales, offsets, centre, k = weight.scales, weight.offsets, 0, weight.in_features
    if weight.bits == 8:
        kind, codes = "int8_quads", weight.codes.view(torch.uint8) ^ 128
    else:
        # Of 8 features, as four bytes of neighbours: the low halves are to have the first four, the high ones the rest.
        first, second = weight.codes.view(-1, k // 8, 2, 2).unbind(2)
        codes = torch.stack((first & 15 | second << 4, first >> 4 | second & 240), dim=-1)
        kind, codes = "int4_quads", codes.view(-1, k // 2)
        if offsets is not None and torch.equal(offsets, -8 * scales):  # Q4_0
            offsets, centre = None, 8
    return PackedLinear(
        kind,
        k,
        _pack_rows(codes.view(torch.int32), is_gated),
        bias,
        _pack_rows(scales, is_gated),
        None if offsets is None else _pack_rows(offsets, is_gated),
        centre=centre,
    )


def pack_bias(linear: Linear, *, is_gated: bool) -> Tensor | None:
    """Return the bias of ``linear`` in panels like its weight's; None: it has none."""
    return None if linear.bias is None else _pack_rows(linear.bias.float()[:, None], is_gated).flatten()


def _pack_rows(rows: Tensor, is_gated: bool) -> Tensor:
    """Pack ``rows`` [out, n] into [panels, n, 16], missing rows zero."""
    halves = rows.contiguous().chunk(2) if is_gated else (rows.contiguous(),)
    across = -(-halves[0].shape[0] // PANEL)  # panels of one half
    if not is_gated:
        across += across % 2  # the loops take two at a time
    packed = torch.empty(across * len(halves), rows.shape[1], PANEL, dtype=rows.dtype)
    native = library.load()
    advise_huge_pages(packed.data_ptr(), packed.nbytes)
    for number, half in enumerate(halves):
        n, k = half.shape
        native.orca_pack(half.data_ptr(), packed.data_ptr(), rows.itemsize, n, k, across, len(halves), number)
    return packed
