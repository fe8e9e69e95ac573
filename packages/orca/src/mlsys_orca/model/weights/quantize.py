"""Weight-only quantisation of floating weights: int8 and int4 with a scale for each group of neighbouring features.

Used while loading, when the user asks for smaller weights than the file has. Rounding to nearest needs no data to
calibrate with.
"""

from __future__ import annotations

from typing import Literal

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.weights.quantized import GROUP_SIZES, QuantizedMatrix, pack_nibbles
from torch import Tensor

Bits = Literal[4, 8]

_PIECE = 1 << 15  # values at a time, whose temporaries fit the caches
_ROUNDS = (
    4  # of fitting int4: they take 7 % off the first guess's error, a search over many guesses 9 % in 8 x the time
)
_HALF = torch.finfo(torch.float16)


def quantize(matrix: Tensor, *, bits: Bits, group_size: int = 32) -> QuantizedMatrix:
    """Quantise a matrix to the nearest codes of ``bits`` bits.

    int8 is symmetric: a group's largest magnitude becomes 127. int4 has a scale and an offset, fitted by least squares:
    at first they span the group's range, then codes and fit are made from each other in turn. Scales and offsets are
    rounded to fp16, before the codes are chosen, where the scale is in its range.

    Args:
        matrix: [out_features, in_features], floating.
        bits: Bits of a code.
        group_size: Neighbouring input features that share a scale: 16 or 32.

    Raises:
        InvalidInputError: ``group_size`` does not divide ``in_features``, or a value is not finite.

    Example:
        >>> quantize(torch.full((1, 32), 0.5), bits=4).dequantized()[0, 0].item()
        0.5
    """
    if group_size not in GROUP_SIZES or matrix.shape[1] % group_size:
        raise InvalidInputError(
            f"rows of {matrix.shape[1]} features do not divide into groups of {group_size}; groups are of 16 or 32"
        )
    groups = matrix.reshape(-1, group_size)
    if bits == 8:
        low, high = torch.aminmax(groups, dim=1, keepdim=True)
        scales, offsets = torch.maximum(-low, high).float() / 127, None
    else:
        fits = [_fit_int4(piece.float()) for piece in torch.split(groups, _PIECE // group_size)]
        scales, offsets = torch.cat([scale for scale, _ in fits]), torch.cat([offset for _, offset in fits])
    if not scales.isfinite().all():
        raise InvalidInputError("a weight that is infinite or no number cannot be quantised: is the file damaged?")
    suits = _suits_half(
        scales, offsets
    )  # by group: what a group becomes depends on no other, so parts are as the whole
    scales = torch.where(suits, scales.half(), scales)
    offsets = None if offsets is None else torch.where(suits, offsets.half(), offsets)
    if suits.all():
        scales, offsets = scales.half(), None if offsets is None else offsets.half()
    shape = len(matrix), -1
    return QuantizedMatrix(
        codes=_codes(groups, scales, offsets).view(shape),
        scales=scales.view(shape),
        offsets=None if offsets is None else offsets.view(shape),
    )


def _fit_int4(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Fit scales and offsets [num_groups, 1] with which codes of 0 to 15 approximate ``groups`` well."""
    means = groups.mean(dim=1, keepdim=True)
    x = groups - means
    low, high = torch.aminmax(x, dim=1, keepdim=True)
    scales, offsets = (high - low) / 15, low
    for _ in range(_ROUNDS):
        codes = (x - offsets).div_(_divisor(scales)).round_().clamp_(0, 15)
        mean_codes = codes.mean(dim=1, keepdim=True)
        codes -= mean_codes
        scales = (codes * x).sum(dim=1, keepdim=True) / _divisor((codes * codes).sum(dim=1, keepdim=True))
        offsets = -scales * mean_codes  # the values' mean is zero
    return scales, offsets + means


def _codes(groups: Tensor, scales: Tensor, offsets: Tensor | None) -> Tensor:
    """Return the nearest codes, int8 [num_groups, group_size] or packed uint8 [num_groups, group_size / 2]."""
    codes = []
    size = _PIECE // groups.shape[1]
    for start in range(0, len(groups), size):
        piece = slice(start, start + size)
        x = groups[piece].float()
        divisors = _divisor(scales[piece].float())
        if offsets is None:
            codes.append((x / divisors).round_().clamp_(-127, 127).to(torch.int8))
        else:
            unsigned = (x - offsets[piece].float()).div_(divisors).round_().clamp_(0, 15)
            codes.append(pack_nibbles(unsigned.to(torch.uint8)))
    return torch.cat(codes)


def _divisor(values: Tensor) -> Tensor:
    """Return ``values`` with one for zero: where a group's values are all alike, what is divided is zero too."""
    return torch.where(values == 0, 1, values)


def _suits_half(scales: Tensor, offsets: Tensor | None) -> Tensor:
    """Return for which groups fp16 has the scale with all its precision, or zero, and the offset is in its range."""
    magnitudes = scales.abs()
    suits = (magnitudes >= _HALF.smallest_normal) & (magnitudes <= _HALF.max) | (scales == 0)
    return suits if offsets is None else suits & (offsets.abs() <= _HALF.max)
