"""Weights as small integers with a scale for each group of them: the one form that every quantisation here comes in.

GGUF's block types (:mod:`.gguf_blocks`) and our own int8 and int4 (:mod:`.quantize`)
become a :class:`QuantizedMatrix`; whatever multiplies by one, in torch or natively, decodes it by the same rule, to the
bit::

    weight = float(scale) * float(code) + float(offset)      # fp32; rounded after the product and after the sum

Without offsets the sum falls away. The product of a GGUF type's scale and code is exact in fp32, so one rounding is
left at most, and it is the format's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor, nn
from torch.nn import functional

GROUP_SIZES = (16, 32)
_SCRATCH = 1 << 17  # values of a weight decoded at a time for a product in torch: they fit a core's cache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedMatrix:
    """A weight [out_features, in_features] in codes of 4 or 8 bits; rows are apart from each other, so they can move.

    Raises:
        InvalidInputError: the parts do not fit each other.

    Example:
        >>> codes = torch.tensor([[-2, 3] * 8], dtype=torch.int8)
        >>> QuantizedMatrix(codes=codes, scales=torch.tensor([[0.5]]), offsets=None).dequantized()[0, :4].tolist()
        [-1.0, 1.5, -1.0, 1.5]
    """

    # 8 bits: int8 [out, in], signed. 4 bits: uint8 [out, in / 2], unsigned: byte j has feature 2j in its low half and
    # 2j + 1 in its high half.
    codes: Tensor
    scales: Tensor  # fp16 or fp32 [out, in / group_size]
    offsets: Tensor | None  # of the scales' dtype and shape; None: nothing is added

    def __post_init__(self) -> None:
        codes, scales, offsets = self.codes, self.scales, self.offsets
        if codes.dtype not in (torch.int8, torch.uint8) or scales.dtype not in (torch.float16, torch.float32):
            raise InvalidInputError(
                f"codes are int8 (8 bits) or uint8 (4 bits) and scales fp16 or fp32, not {codes.dtype} with "
                f"{scales.dtype}"
            )
        if codes.ndim != 2 or scales.ndim != 2 or len(codes) != len(scales):
            raise InvalidInputError(f"codes {tuple(codes.shape)} and scales {tuple(scales.shape)} differ in their rows")
        if self.in_features not in [scales.shape[1] * size for size in GROUP_SIZES]:
            raise InvalidInputError(
                f"{scales.shape[1]} scales a row cannot serve {self.in_features} features: groups are of 16 or of 32"
            )
        if offsets is not None and (offsets.shape != scales.shape or offsets.dtype != scales.dtype):
            raise InvalidInputError(
                f"offsets {offsets.dtype} {tuple(offsets.shape)} are not like scales {scales.dtype} "
                f"{tuple(scales.shape)}"
            )

    @property
    def bits(self) -> int:
        """Bits of a code: 4 or 8."""
        return 8 if self.codes.dtype == torch.int8 else 4

    @property
    def out_features(self) -> int:
        """Rows."""
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        """Columns."""
        return self.codes.shape[1] * 8 // self.bits

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.out_features, self.in_features

    @property
    def group_size(self) -> int:
        """Neighbouring input features that share a scale: 16 or 32."""
        return self.in_features // self.scales.shape[1]

    @property
    def device(self) -> torch.device:
        """Device of the parts."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Memory of codes, scales and offsets."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    def unpacked_codes(self) -> Tensor:
        """Return one code per value: int8, or uint8 from 0 to 15, [out_features, in_features]."""
        if self.bits == 8:
            return self.codes
        if self.codes.is_meta:
            return torch.empty(self.shape, dtype=torch.uint8, device="meta")
        return torch.stack((self.codes & 15, self.codes >> 4), dim=-1).view(self.shape)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values [out_features, in_features], computed in fp32 and cast to ``dtype``."""
        groups = (*self.scales.shape, self.group_size)
        values = self.unpacked_codes().view(groups) * self.scales.float()[..., None]
        if self.offsets is not None:
            values += self.offsets.float()[..., None]
        return values.view(self.shape).to(dtype)

    def rows(self, which: slice | Tensor) -> QuantizedMatrix:
        """Return some of the rows: a view for a slice, a copy for int64 indices [num_rows]."""
        return self.map(lambda part: part[which])

    def columns(self, start: int, stop: int) -> QuantizedMatrix:
        """Return a copy of some of the columns.

        Raises:
            InvalidInputError: they part a group.
        """
        size, width = self.group_size, 8 // self.bits
        if start % size or stop % size:
            raise InvalidInputError(f"columns {start} to {stop} part a group of {size} features with one scale")
        groups, codes = slice(start // size, stop // size), slice(start // width, stop // width)
        return QuantizedMatrix(
            codes=self.codes[:, codes].contiguous(),
            scales=self.scales[:, groups].contiguous(),
            offsets=None if self.offsets is None else self.offsets[:, groups].contiguous(),
        )

    def compact(self) -> QuantizedMatrix:
        """Return the same matrix with scales and offsets in fp16, if that holds them exactly; else itself."""
        scales, offsets = self.scales.half(), None if self.offsets is None else self.offsets.half()
        is_exact = torch.equal(scales.float(), self.scales.float()) and (
            offsets is None or self.offsets is None or torch.equal(offsets.float(), self.offsets.float())
        )
        return QuantizedMatrix(codes=self.codes, scales=scales, offsets=offsets) if is_exact else self

    def map(self, change: Callable[[Tensor], Tensor]) -> QuantizedMatrix:
        """Return a matrix with the same change made to codes, scales and offsets: the order of rows, or the device."""
        offsets = None if self.offsets is None else change(self.offsets)
        return QuantizedMatrix(codes=change(self.codes), scales=change(self.scales), offsets=offsets)


Matrix = Tensor | QuantizedMatrix  # a weight [out_features, in_features], however it is kept


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack codes of 0 to 15, uint8 [..., n], two a byte as in :class:`QuantizedMatrix`: [..., n / 2]."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def product(x: Tensor, weight: QuantizedMatrix, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias`` in ``x``'s dtype: ``x`` [..., in_features] -> [..., out_features].

    torch has no product that decodes as it goes, so some rows at a time are decoded into a scratch.
    """
    out = x.new_empty(*x.shape[:-1], weight.out_features)
    num_rows = max(1, _SCRATCH // weight.in_features)
    for start in range(0, weight.out_features, num_rows):
        rows = slice(start, start + num_rows)
        out[..., rows] = functional.linear(x, weight.rows(rows).dequantized(x.dtype))
    return out if bias is None else out.add_(bias)


def concatenate_rows(pieces: Sequence[Matrix]) -> Matrix:
    """Return one matrix of the rows of several, of equal in_features and with every value as it was.

    Quantised pieces of one kind are laid together. Where kinds differ, as the projections of one layer do in GGUF's
    mixed files, all take the widest: 4-bit codes become bytes, a scale is repeated for the halves of its group, an
    offset of zero is added. That costs memory for those pieces and no precision. Beside a floating piece the others
    become floating too, of its dtype.
    """
    if len(pieces) == 1:
        return pieces[0]
    if floating := [piece for piece in pieces if isinstance(piece, Tensor)]:
        dtype = floating[0].dtype
        return torch.cat([piece if isinstance(piece, Tensor) else piece.dequantized(dtype) for piece in pieces])
    return _concatenate([piece for piece in pieces if isinstance(piece, QuantizedMatrix)])


def concatenate_columns(pieces: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Return one matrix of the columns of several of one kind, beside each other."""
    if len(pieces) == 1:
        return pieces[0]
    offsets = [piece.offsets for piece in pieces if piece.offsets is not None]
    return QuantizedMatrix(
        codes=torch.cat([piece.codes for piece in pieces], dim=1),
        scales=torch.cat([piece.scales.float() for piece in pieces], dim=1),
        offsets=torch.cat([part.float() for part in offsets], dim=1) if offsets else None,
    )


def _concatenate(pieces: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    bits, group_size = max(piece.bits for piece in pieces), min(piece.group_size for piece in pieces)
    has_offsets = any(piece.offsets is not None for piece in pieces)
    dtype = torch.float32 if any(piece.scales.dtype == torch.float32 for piece in pieces) else torch.float16

    def per_group(piece: QuantizedMatrix, values: Tensor) -> Tensor:
        return values.to(dtype).repeat_interleave(piece.group_size // group_size, dim=1)

    def offsets(piece: QuantizedMatrix) -> Tensor:
        return torch.zeros_like(piece.scales) if piece.offsets is None else piece.offsets

    return QuantizedMatrix(
        codes=_joined([p.codes if p.bits == bits else p.unpacked_codes().view(torch.int8) for p in pieces]),
        scales=_joined([per_group(piece, piece.scales) for piece in pieces]),
        offsets=_joined([per_group(piece, offsets(piece)) for piece in pieces]) if has_offsets else None,
    )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return ``parts`` one below the other; those without memory need a second of imports for `torch.cat`."""
    if parts[0].is_meta:
        return torch.empty(sum(map(len, parts)), *parts[0].shape[1:], dtype=parts[0].dtype, device="meta")
    return torch.cat(list(parts))


def weights_nbytes(module: nn.Module) -> int:
    """Return the bytes of all weights below ``module``, floating and quantised; what two parts share counts once."""
    held: list[Tensor | QuantizedMatrix] = [*module.buffers(), *module.parameters()]
    for part in module.modules():
        held += [value for value in vars(part).values() if isinstance(value, QuantizedMatrix)]
    distinct = {id(weight): weight for weight in held}.values()
    return sum(w.nbytes if isinstance(w, QuantizedMatrix) else w.numel() * w.element_size() for w in distinct)
