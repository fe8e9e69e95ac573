"""GGUF's quantised blocks as codes with a scale and an offset per group: the table of types that are understood here.

Values are ``scale * code + offset`` in fp32 (:mod:`mlsys_orca.model.weights.quantized`), bit for bit those of
``gguf.quants.dequantize``: a scale has at most 18 significant bits and its codes 6, so their product is exact, and the
one rounding left is the format's own subtraction of its minimum. From here a tensor goes two ways: kept as it is, by
:func:`quantized_matrix`, or dequantised in place and in pieces that fit the caches (five times as fast as the library).
A piece runs in one thread: a team waits for its slowest thread at every operator.

Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.weights.checkpoint import Cut
from mlsys_orca.model.weights.quantized import PARTS, QuantizedMatrix, concatenate_columns, pack_nibbles
from numpy.typing import NDArray
from torch import Tensor

_PIECE = 1 << 15  # values decoded at a time, whose temporaries fit the caches


class Groups(NamedTuple):
    """The groups of some blocks."""

    codes: Tensor  # [num_blocks, groups, group_size]: uint8 where 4 bits hold them, else int8
    scales: Tensor  # fp32 [num_blocks, groups, 1]; K-quants: int8, in units of `factors`
    offsets: Tensor | None  # as scales
    factors: Tensor | None = None  # fp16 [num_blocks, 1, 1]
    offset_factors: Tensor | None = None  # likewise

    def in_floats(self) -> tuple[Tensor, Tensor | None]:
        """Return scales and offsets in fp32; the products by factors are exact."""
        if self.factors is None:
            return self.scales, self.offsets
        offsets = None
        if self.offsets is not None and self.offset_factors is not None:
            offsets = self.offset_factors.float() * self.offsets
        return self.factors.float() * self.scales, offsets


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return the fp16 scalar at byte ``start`` of each block, as fp32 [num_blocks, 1, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()[:, None]


def _nibbles(codes: Tensor) -> Tensor:
    """Split n bytes per block into 4-bit codes [num_blocks, 2, n].

    Value i is in byte i's low half, value n + i in its high half.
    """
    return torch.stack((codes & 15, codes >> 4), dim=1)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Return bit i of the four bytes from ``start`` for value i, worth 16: uint8 [num_blocks, 1, 32]."""
    bits = blocks[:, start : start + 4, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return (bits << 4).view(-1, 1, 32)


def _q4_0(blocks: Tensor) -> Groups:
    """Read a scale (fp16), then 32 codes centred at 8; the centre becomes an offset, without rounding."""
    scales = _half(blocks, 0)
    return Groups(_nibbles(blocks[:, 2:]).view(-1, 1, 32), scales, -8 * scales)


def _q4_1(blocks: Tensor) -> Groups:
    """Read a scale and a minimum (fp16), then 32 codes."""
    return Groups(_nibbles(blocks[:, 4:]).view(-1, 1, 32), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Groups:
    """Read a scale (fp16), 32 fifth bits, and 32 codes centred at 16."""
    codes = _nibbles(blocks[:, 6:]).view(-1, 1, 32) | _fifth_bits(blocks, 2)
    return Groups(codes.view(torch.int8) - 16, _half(blocks, 0), None)


def _q5_1(blocks: Tensor) -> Groups:
    """Read a scale and a minimum (fp16), 32 fifth bits, and 32 codes."""
    codes = _nibbles(blocks[:, 8:]).view(-1, 1, 32) | _fifth_bits(blocks, 4)
    return Groups(codes.view(torch.int8), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Groups:
    """Read a scale (fp16), then 32 signed bytes."""
    return Groups(blocks[:, 2:].contiguous().view(torch.int8).view(-1, 1, 32), _half(blocks, 0), None)


class _KScales(NamedTuple):
    """Scales and minima of a K-quant's 8 groups of 32."""

    scales: Tensor  # int8 [num_blocks, 8, 1], as the minima
    offsets: Tensor
    factors: Tensor  # fp16 [num_blocks, 1, 1]
    offset_factors: Tensor


def _k_scales(blocks: Tensor) -> _KScales:
    """Read the scales and minima of a K-quant's blocks.

    Two fp16 factors, then eight scales and eight minima of 6 bits in 12 bytes: four of each in the low bits of the
    first eight bytes, the others' low halves in the last four and their high bits in what the first eight have left.
    """
    scales, minima, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((scales & 63, low & 15 | scales >> 6 << 4), dim=1)
    minima = torch.cat((minima & 63, low >> 4 | minima >> 6 << 4), dim=1)
    factors, of_minima = (_half(blocks, start).half() for start in (0, 2))
    return _KScales(scales.view(torch.int8)[..., None], minima.view(torch.int8)[..., None], factors, -of_minima)


def _q4_k(blocks: Tensor) -> Groups:
    """Read scales (:func:`_k_scales`), then 4 times 32 bytes: the codes of two groups, low and high halves."""
    return Groups(_nibbles(blocks[:, 16:].reshape(-1, 32)).view(-1, 8, 32), *_k_scales(blocks))


def _q5_k(blocks: Tensor) -> Groups:
    """Read blocks like :func:`_q4_k`'s, with 32 bytes between whose bit g is the fifth bit of group g."""
    low = _nibbles(blocks[:, 48:].reshape(-1, 32)).view(-1, 8, 32)
    high = (blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1) << 4
    return Groups((low | high).view(torch.int8), *_k_scales(blocks))


def _twos(codes: Tensor) -> Tensor:
    """Split 64 bytes per block into 2-bit codes [num_blocks, 2, 4, 32].

    Either half of a block has 32 of the bytes: bits 2n and 2n + 1 of byte i for value 32n + i.
    """
    return codes.reshape(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3


def _q2_k(blocks: Tensor) -> Groups:
    """Read 16 bytes with a scale in the low half and a minimum in the high one, codes, and a factor (fp16) of each."""
    small, codes = blocks[:, :16, None], _twos(blocks[:, 16:80]).reshape(-1, 16, 16)
    factors, of_minima = (_half(blocks, start).half() for start in (80, 82))
    return Groups(codes, (small & 15).view(torch.int8), (small >> 4).view(torch.int8), factors, -of_minima)


def _q3_k(blocks: Tensor) -> Groups:
    """Read 32 bytes whose bit n is the third bit of value 32n + i, codes, 16 scales in 12 bytes, and a factor (fp16).

    Codes are centred at 4, scales at 32: their low halves are in the first eight bytes as in :func:`_nibbles`, the two
    high bits of four neighbours in those of one position of the other four bytes.
    """
    high = blocks[:, None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    codes = (_twos(blocks[:, 32:96]) | high.view(-1, 2, 4, 32) << 2).view(torch.int8) - 4
    low, top = _nibbles(blocks[:, 96:104]).view(-1, 16), blocks[:, None, 104:108]
    top = top >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    scales = (low | top.reshape(-1, 16) << 4).view(torch.int8) - 32
    return Groups(codes.reshape(-1, 16, 16), scales[..., None], None, _half(blocks, 108).half())


def _q6_k(blocks: Tensor) -> Groups:
    """Read 128 bytes of low halves, 64 of two high bits each, 16 signed scales and a factor (fp16), centred at 32.

    Either half of a block has 64 of those bytes: low halves of values 0-63, high halves of 64-127; and as in
    :func:`_twos`.
    """
    low = _nibbles(blocks[:, :128].reshape(-1, 64)).view(-1, 2, 4, 32)
    codes = (low | _twos(blocks[:, 128:192]) << 4).view(torch.int8) - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8)[..., None]
    return Groups(codes.view(-1, 16, 16), scales, None, _half(blocks, 208).half())


_FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice those of a code of MXFP4


def fp4_codes(nibbles: Tensor) -> Tensor:
    """Return twice the values of MXFP4's codes 0 to 15: uint8 of any shape -> int8."""
    return torch.tensor(_FP4_VALUES, dtype=torch.int8)[nibbles.long()]


def halves_of_exponents(exponents: Tensor) -> Tensor:
    """Return half the power of two of each E8M0 exponent, uint8 -> fp32 of the same shape, exactly."""
    return torch.ldexp(torch.tensor(1.0, dtype=torch.float64), exponents.double() - 128).float()


def _mxfp4(blocks: Tensor) -> Groups:
    """Read an exponent, then 32 codes of four bits: a sign, two bits of exponent, one of mantissa."""
    codes = fp4_codes(_nibbles(blocks[:, 1:]).view(-1, 1, 32))
    return Groups(codes, halves_of_exponents(blocks[:, :1])[:, None], None)


GROUPED: dict[GGMLQuantizationType, Callable[[Tensor], Groups]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q2_K: _q2_k,
    GGMLQuantizationType.Q3_K: _q3_k,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
    GGMLQuantizationType.MXFP4: _mxfp4,
}


def quantized_matrix(data: NDArray[np.uint8], kind: GGMLQuantizationType, in_features: int) -> QuantizedMatrix:
    """Return a tensor's bytes as a matrix of the same values, with rows of ``in_features``.

    Args:
        data: The tensor's bytes, [nbytes].
        kind: One of :data:`GROUPED`.
        in_features: Values of a row; the last dimension of the tensor's shape.
    """
    block_len, block_nbytes = GGML_QUANT_SIZES[kind]
    blocks = torch.from_numpy(data).view(-1, block_nbytes)
    groups = [GROUPED[kind](piece) for piece in torch.split(blocks, _PIECE // block_len)]
    num_rows = len(blocks) * block_len // in_features

    def joined(name: str) -> Tensor | None:
        parts = [getattr(group, name) for group in groups]
        return None if parts[0] is None else torch.cat(parts).view(num_rows, -1)

    codes = [pack_nibbles(part.codes) if part.codes.dtype == torch.uint8 else part.codes for part in groups]
    others: dict[str, Any] = {name: joined(name) for name in PARTS[1:]}
    return QuantizedMatrix(codes=torch.cat(codes).view(num_rows, -1), **others).compact()


def covered_blocks(
    data: NDArray[np.uint8], kind: GGMLQuantizationType, shape: tuple[int, ...], axis: int, part: range
) -> tuple[NDArray[np.uint8], int, tuple[int, ...]]:
    """Return a copy of the blocks that hold ``part`` of a tensor along ``axis``, as few as can be.

    Returns:
        Their bytes [nbytes]; where the part begins along the axis; the shape of the values of the blocks.
    """
    block_len, block_nbytes = GGML_QUANT_SIZES[kind]
    blocks = data.reshape(*shape[:-1], shape[-1] // block_len, block_nbytes)
    unit = block_len if axis == len(shape) - 1 else 1
    begin, end = part.start // unit, -(-part.stop // unit)
    index = (*(slice(None) for _ in range(axis)), slice(begin, end))
    taken = np.ascontiguousarray(blocks[index])
    size = (*shape[:axis], (end - begin) * unit, *shape[axis + 1 :])
    return taken.reshape(-1), part.start - begin * unit, size


def quantized_part(
    data: NDArray[np.uint8], kind: GGMLQuantizationType, shape: tuple[int, ...], cut: Cut
) -> QuantizedMatrix:
    """Return part of a tensor as :func:`quantized_matrix` does all of it; other blocks stay unread.

    Raises:
        InvalidInputError: the cut parts a group.
    """
    pieces = []
    if cut.axis == len(shape) - 1:
        for each in cut.ranges:
            blocks, first, size = covered_blocks(data, kind, shape, cut.axis, each)
            pieces.append(quantized_matrix(blocks, kind, size[-1]).columns(first, first + len(each)))
        return concatenate_columns(pieces)
    # Ranges of rows lie in one tensor beside each other: their blocks are one array.
    blocks = np.concatenate([covered_blocks(data, kind, shape, cut.axis, each)[0] for each in cut.ranges])
    if cut.axis and len(cut.ranges) > 1:
        raise InvalidInputError(f"a tensor of {len(shape)} dimensions cannot be cut in parts of axis {cut.axis}")
    return quantized_matrix(blocks, kind, shape[-1])


_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def dequantize_into(data: NDArray[np.uint8], kind: GGMLQuantizationType, out: Tensor) -> None:
    """Write the values of one tensor's bytes into ``out``.

    Args:
        data: The tensor's bytes, [nbytes].
        kind: Their quantisation type, one that :func:`check_types` accepts.
        out: Where the values go: contiguous, floating, with as many elements as ``data`` codes.
    """
    flat = out.view(-1)
    if dtype := _PLAIN.get(kind):
        flat.copy_(torch.from_numpy(data.copy()).view(dtype))  # a copy, since the file's offset may not suit the type
        return
    block_len, block_nbytes = GGML_QUANT_SIZES[kind]
    blocks = torch.from_numpy(data).view(-1, block_nbytes)
    values = flat.view(-1, block_len)
    step = _PIECE // block_len
    for piece, part in zip(torch.split(blocks, step), torch.split(values, step), strict=True):
        part.copy_(_decode(piece, kind).view(part.shape))


def dequantize_part_into(
    data: NDArray[np.uint8], kind: GGMLQuantizationType, shape: tuple[int, ...], cut: Cut, out: Tensor
) -> None:
    """Write the values of part of a tensor into ``out``, contiguous and of the part's shape; other blocks stay unread.

    Args:
        data: The tensor's bytes, [nbytes].
        kind: Their quantisation type.
        shape: The tensor's shape.
        cut: The part.
        out: Where the values go.
    """
    start = 0
    for each in cut.ranges:
        blocks, first, size = covered_blocks(data, kind, shape, cut.axis, each)
        values = torch.empty(size)
        dequantize_into(blocks, kind, values)
        part = values.narrow(cut.axis, first, len(each))
        out.narrow(cut.axis, start, len(each)).copy_(part)
        start += len(each)


def check_types(kinds: Iterable[GGMLQuantizationType]) -> None:
    """See that :func:`dequantize_into` can read ``kinds``, before any tensor is read.

    Raises:
        InvalidInputError: one is a type that neither this module nor the ``gguf`` library dequantises.
    """
    for kind in set(kinds) - set(_PLAIN) - set(GROUPED):
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            raise InvalidInputError(
                f"tensors of type {kind.name} cannot be read; F32, F16, BF16, "
                f"{', '.join(known.name for known in GROUPED)} and whatever else the installed gguf library "
                "dequantises can"
            ) from None


def _decode(blocks: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """Return the fp32 values of ``blocks`` [num_blocks, block_nbytes], in their order."""
    if read_groups := GROUPED.get(kind):
        groups = read_groups(blocks)
        scales, offsets = groups.in_floats()
        values = groups.codes * scales
        return values if offsets is None else values.add_(offsets)
    return torch.from_numpy(dequantize(blocks.numpy(), kind))
