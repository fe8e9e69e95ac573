"""A linear's weight in the form that the native loops read: panels of 16 columns, input feature after feature."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any, Literal

import torch
from mlsys_core.memory.pages import advise_huge_pages
from mlsys_orca.backends.native import library
from mlsys_orca.backends.native.library import PANEL, address
from mlsys_orca.model.layers import Linear
from mlsys_orca.model.weights.quantized import PARTS, QuantizedMatrix
from torch import Tensor

Rows = Literal["int8", "float"]  # the form in which rows meet packed codes

_LEAST_BLOCK = 32  # features of a block of groups, in the kernels
_ROWS_AT_ONCE = 512  # that are brought into planes: what that takes beside stays small
_CENTRES = {3: 4, 6: 32}  # of signed codes in blocks, by their bits
_KINDS = {torch.float32: "f32", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A packed weight and its bias. Owner: the native decoder, whose program points into the tensors."""

    kind: str  # weights.h: Kind
    k: int  # input features
    # [panels, K, 16]; 4-bit codes: [panels, K / 2, 16]; int32: bf16 pairs [panels, K / 2, 16], quads of codes [panels,
    # K * bits / 32, 16].
    codes: Tensor
    bias: Tensor | None  # fp32 [panels * 16]
    scales: Tensor | None = None  # fp16 or fp32 [panels, groups, 16]; int8: in units of the factors
    offsets: Tensor | None = None  # as scales
    factors: Tensor | None = None  # fp16 [panels, blocks, 16]
    offset_factors: Tensor | None = None  # as factors
    takes_bf16: bool = False  # rows and decoded codes may be rounded to bf16
    centre: int = 0  # is subtracted from codes of 3 to 6 bits

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        parts = (self.bias, *(getattr(self, name) for name in PARTS))
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def is_integer(self) -> bool:
        """True if rows are quantised for it, so that integers are multiplied."""
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
            "block_size": 0 if self.factors is None else self.k // self.factors.shape[1],
            **{name: address(getattr(self, name)) for name in PARTS},
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
    activations: Rows = "float",
    num_slices: int = 1,
) -> PackedLinear:
    """Take the weight of ``linear`` and pack it.

    Args:
        linear: Loses its weight.
        is_gated: Its columns are gates, then as many factors: panels of the two alternate.
        in_pairs: bf16 in pairs, for machines that multiply them so; None: where this machine does.
        takes_bf16: For codes: where the processor multiplies pairs of bf16, rows and decoded weights are rounded.
        activations: For codes: ``"int8"``: rows are quantised too, and integers are multiplied.
        num_slices: Slices of the features that are summed apart: no block of groups lies in two.

    Raises:
        InvalidInputError: the weight was taken before.
    """
    packed_bias, weight = pack_bias(linear, is_gated=is_gated), linear.take_weight()
    if isinstance(weight, QuantizedMatrix):
        weight = _for_slices(weight, num_slices)
        if activations == "int8":
            return _pack_quads(weight, packed_bias, is_gated=is_gated)
        return _packed("int8" if weight.bits == 8 else "int4", weight, weight.codes, packed_bias, is_gated, takes_bf16)
    k = weight.shape[1]
    if in_pairs is None:
        in_pairs = bool(library.load().orca_has_pairs())
    if in_pairs and weight.dtype == torch.bfloat16 and k % 2 == 0:
        pairs = weight.contiguous().view(torch.int32)
        return PackedLinear("bf16_pairs", k, _pack_rows(pairs, is_gated), packed_bias)
    return PackedLinear(_KINDS[weight.dtype], k, _pack_rows(weight, is_gated), packed_bias)


def _for_slices(weight: QuantizedMatrix, num_slices: int) -> QuantizedMatrix:
    """Return ``weight`` with blocks that no slice of its features parts; without factors where there are none such."""
    if weight.block_size is None:
        return weight
    size = gcd(weight.block_size, weight.in_features // num_slices)
    return weight.in_blocks(size) if size % max(_LEAST_BLOCK, weight.group_size) == 0 else weight.without_factors()


def _pack_quads(weight: QuantizedMatrix, bias: Tensor | None, *, is_gated: bool) -> PackedLinear:
    """Pack codes for integer products: the bytes of four neighbouring features stand together."""
    if weight.factors is not None:
        if (bits := _bits_of_blocks(weight)) is not None:
            codes = _planes(weight.unpacked_codes(), bits)
            return _packed(f"int{bits}_quads", weight, codes, bias, is_gated, centre=_CENTRES.get(bits, 0))
        weight = weight.without_factors()
    if weight.bits == 8:
        return _packed("int8_quads", weight, (weight.codes.view(torch.uint8) ^ 128).view(torch.int32), bias, is_gated)
    k = weight.in_features
    # Of 8 features, as four bytes of neighbours: the low halves are to have the first four, the high ones the rest.
    first, second = weight.codes.view(-1, k // 8, 2, 2).unbind(2)
    codes = torch.stack((first & 15 | second << 4, first >> 4 | second & 240), dim=-1)
    return _packed("int4_quads", weight, codes.view(-1, k // 2).view(torch.int32), bias, is_gated)


def _bits_of_blocks(weight: QuantizedMatrix) -> int | None:
    """Return the bits in which the kernels of blocks take the codes; None: in none."""
    if weight.bits == 4 and weight.group_size == 32:
        return 4
    low, high = torch.aminmax(weight.unpacked_codes()) if weight.codes.numel() else (0, 0)
    if weight.group_size == 32:
        return 5 if low >= 0 and high < 32 else None
    if weight.bits == 4:
        return 2 if high < 4 else None
    signed = (bits for bits, centre in _CENTRES.items() if -centre <= low and high < centre)
    return next(signed, None) if weight.offsets is None else None


def _planes(codes: Tensor, bits: int) -> Tensor:
    """Return codes [rows, K] as int32 [rows, K * bits / 32]: planes of quads, then what these leave (BlockPanel)."""
    num_quads = {2: 4, 3: 8, 4: 2, 5: 8, 6: 4}[bits]
    width = 2 if bits < 4 else 4
    packed = []
    for rows in torch.split(codes, _ROWS_AT_ONCE):
        raised = rows.view(torch.uint8) + _CENTRES.get(bits, 0)
        quads = raised.view(len(rows), -1, num_quads, 4)
        low, rest = quads & (1 << width) - 1, quads >> width
        line = _beside(low, width)
        if bits > width:
            line = torch.cat((line, _beside(rest, bits - width)), dim=2)
        packed.append(line.view(len(rows), -1).view(torch.int32))
    return torch.cat(packed)


def _beside(quads: Tensor, width: int) -> Tensor:
    """Return as many neighbouring quads as a byte holds in one: uint8 [rows, lines, n, 4] -> [rows, lines, m, 4]."""
    rows, lines, num_quads, _ = quads.shape
    places = torch.arange(0, min(8, width * num_quads), width, dtype=torch.uint8)[:, None]
    return (quads.view(rows, lines, -1, len(places), 4) << places).sum(3, dtype=torch.uint8)


def _packed(
    kind: str,
    weight: QuantizedMatrix,
    codes: Tensor,
    bias: Tensor | None,
    is_gated: bool,
    takes_bf16: bool = False,
    *,
    centre: int = 0,
) -> PackedLinear:
    """Pack ``codes``, and the scales of ``weight``; offsets that a centre of the codes makes up for are left out."""
    parts = {name: part for name, part in weight.parts.items() if part is not None and name != "codes"}
    is_plain = weight.bits == 4 and weight.offsets is not None and weight.factors is None
    if is_plain and torch.equal(parts["offsets"], -8 * weight.scales):  # Q4_0
        centre = 8
        del parts["offsets"]
    packed = {name: _pack_rows(part, is_gated) for name, part in parts.items()}
    own = _pack_rows(codes, is_gated)
    return PackedLinear(kind, weight.in_features, own, bias, takes_bf16=takes_bf16, centre=centre, **packed)


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
