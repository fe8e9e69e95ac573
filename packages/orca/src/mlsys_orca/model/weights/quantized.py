"""Weights as small integers with a scale for each group of them: the one form that every quantisation here comes in.

GGUF's block types (:mod:`.gguf_blocks`) and our own int8 and int4 (:mod:`.quantize`)
become a :class:`QuantizedMatrix`; whatever multiplies by one, in torch or natively, decodes it by the same rule, to the
bit::

    weight = float(scale) * float(code) + float(offset)      # fp32; rounded after the product and after the sum

Without offsets the sum falls away. The product of a GGUF type's scale and code is exact in fp32, so one rounding is
left at most, and it is the format's own. K-quants keep their scales and offsets as small integers in units of a
factor that a block of groups shares; ``float(factor) * float(scale)`` is exact as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor, nn
from torch.nn import functional

GROUP_SIZES = (16, 32)
PARTS = ("codes", "scales", "offsets", "factors", "offset_factors")  # of a matrix
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
    scales: Tensor  # fp16 or fp32 [out, in / group_size]; int8: in units of the factors
    offsets: Tensor | None  # of the scales' dtype and shape; None: nothing is added
    factors: Tensor | None = None  # fp16 [out, in / block_size] of int8 scales
    offset_factors: Tensor | None = None  # as factors, of int8 offsets

    def __post_init__(self) -> None:
        codes, scales, offsets = self.codes, self.scales, self.offsets
        known = (torch.float16, torch.float32) if self.factors is None else (torch.int8,)
        if codes.dtype not in (torch.int8, torch.uint8) or scales.dtype not in known:
            raise InvalidInputError(
                f"codes are int8 (8 bits) or uint8 (4 bits) and scales fp16 or fp32, or int8 with factors, not "
                f"{codes.dtype} with {scales.dtype}{'' if self.factors is None else ' and factors'}"
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
        self._check_factors()

    def _check_factors(self) -> None:
        factors, others = self.factors, self.offset_factors
        if (others is None) != (factors is None or self.offsets is None):
            raise InvalidInputError("offsets have factors where scales have them, and nowhere else")
        if factors is None:
            return
        num_blocks = factors.shape[-1] if factors.ndim == 2 and len(factors) == len(self.codes) else 0
        if factors.dtype != torch.float16 or num_blocks < 1 or self.scales.shape[1] % num_blocks:
            raise InvalidInputError(
                f"factors {factors.dtype} {tuple(factors.shape)} do not fit scales {tuple(self.scales.shape)}"
            )
        if others is not None and (others.shape != factors.shape or others.dtype != factors.dtype):
            raise InvalidInputError(
                f"factors of offsets {others.dtype} {tuple(others.shape)} are not like those of scales"
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
    def block_size(self) -> int | None:
        """Neighbouring input features that share a factor; None: there are no factors."""
        return None if self.factors is None else self.in_features // self.factors.shape[1]

    @property
    def device(self) -> torch.device:
        """Device of the parts."""
        return self.codes.device

    @property
    def parts(self) -> dict[str, Tensor | None]:
        """All tensors, by the names of :data:`PARTS`."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def nbytes(self) -> int:
        """Memory of all parts."""
        return sum(part.nbytes for part in self.parts.values() if part is not None)

    def is_like(self, other: QuantizedMatrix) -> bool:
        """Return whether both have the same parts of the same dtypes and sizes of groups and blocks."""
        return (
            (self.codes.dtype, self.scales.dtype, self.offsets is None, self.group_size, self.block_size)
            == (other.codes.dtype, other.scales.dtype, other.offsets is None, other.group_size, other.block_size)
        )  # fmt: skip

    def unpacked_codes(self) -> Tensor:
        """Return one code per value: int8, or uint8 from 0 to 15, [out_features, in_features]."""
        if self.bits == 8:
            return self.codes
        if self.codes.is_meta:
            return torch.empty(self.shape, dtype=torch.uint8, device="meta")
        return torch.stack((self.codes & 15, self.codes >> 4), dim=-1).view(self.shape)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values [out_features, in_features], computed in fp32 and cast to ``dtype``."""
        plain = self.without_factors()
        groups = (*plain.scales.shape, plain.group_size)
        values = plain.unpacked_codes().view(groups) * plain.scales.float()[..., None]
        if plain.offsets is not None:
            values += plain.offsets.float()[..., None]
        return values.view(self.shape).to(dtype)

    def without_factors(self) -> QuantizedMatrix:
        """Return the same values with scales and offsets in fp32, if there are factors; else itself."""
        if self.factors is None:
            return self
        offsets = None
        if self.offsets is not None and self.offset_factors is not None:
            offsets = _times(self.offsets, self.offset_factors)
        return QuantizedMatrix(codes=self.codes, scales=_times(self.scales, self.factors), offsets=offsets)

    def in_blocks(self, size: int) -> QuantizedMatrix:
        """Return the same values with a factor for every ``size`` features, which divides the blocks it has."""
        assert self.block_size is not None
        assert self.block_size % size == 0
        if size == self.block_size:
            return self
        finer = {
            name: None if part is None else part.repeat_interleave(self.block_size // size, dim=1)
            for name, part in (("factors", self.factors), ("offset_factors", self.offset_factors))
        }
        return QuantizedMatrix(codes=self.codes, scales=self.scales, offsets=self.offsets, **finer)

    def rows(self, which: slice | Tensor) -> QuantizedMatrix:
        """Return some of the rows: a view for a slice, a copy for int64 indices [num_rows]."""
        return self.map(lambda part: part[which])

    def columns(self, start: int, stop: int) -> QuantizedMatrix:
        """Return a copy of some of the columns.

        Raises:
            InvalidInputError: they part a group.
        """
        size = self.group_size
        if start % size or stop % size:
            raise InvalidInputError(f"columns {start} to {stop} part a group of {size} features with one scale")
        if self.block_size is not None and (parted := gcd(start, stop, self.block_size)) < self.block_size:
            return self.in_blocks(parted).columns(start, stop)

        def own(part: Tensor) -> Tensor:
            width = self.in_features // part.shape[1]
            return part[:, start // width : stop // width].contiguous()

        return self.map(own)

    def compact(self) -> QuantizedMatrix:
        """Return the same matrix with scales and offsets in fp16, if that holds them exactly; else itself."""
        if self.factors is not None:
            return self
        scales, offsets = self.scales.half(), None if self.offsets is None else self.offsets.half()
        is_exact = torch.equal(scales.float(), self.scales.float()) and (
            offsets is None or self.offsets is None or torch.equal(offsets.float(), self.offsets.float())
        )
        return QuantizedMatrix(codes=self.codes, scales=scales, offsets=offsets) if is_exact else self

    def map(self, change: Callable[[Tensor], Tensor]) -> QuantizedMatrix:
        """Return a matrix with the same change made to every part: the order of rows, or the device."""
        changed = {name: None if part is None else change(part) for name, part in self.parts.items()}
        return QuantizedMatrix(**changed)  # type: ignore[arg-type]  # codes and scales are there


def _times(small: Tensor, factors: Tensor) -> Tensor:
    """Return ``small`` [rows, groups] int8 times the factor of its block, fp32; ``factors`` fp16 [rows, blocks]."""
    if small.is_meta:
        return torch.empty(small.shape, device="meta")
    blocks = small.view(*factors.shape, -1).float() * factors.float()[..., None]
    return blocks.view(small.shape)


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
    if sizes := [piece.block_size for piece in pieces if piece.block_size is not None]:
        return _beside([piece.in_blocks(gcd(*sizes)) for piece in pieces])
    return _beside([piece.map(lambda part: part.float() if part.is_floating_point() else part) for piece in pieces])


def _beside(pieces: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    def joined(name: str) -> Tensor | None:
        parts = [piece.parts[name] for piece in pieces]
        return None if parts[0] is None else torch.cat(parts, dim=1)  # type: ignore[arg-type]  # none is missing

    return QuantizedMatrix(**{name: joined(name) for name in PARTS})  # type: ignore[arg-type]


def _concatenate(pieces: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    if all(piece.is_like(pieces[0]) for piece in pieces):
        same = {name: [piece.parts[name] for piece in pieces] for name in PARTS}
        return QuantizedMatrix(**{n: None if p[0] is None else _joined(p) for n, p in same.items()})  # type: ignore[arg-type]
    pieces = [piece.without_factors() for piece in pieces]
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
