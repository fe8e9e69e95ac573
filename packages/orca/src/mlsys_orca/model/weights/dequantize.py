"""Quantised blocks of a GGUF tensor to floating values, in place and in cache-sized pieces.

Called by :class:`mlsys_orca.model.weights.gguf_file.GgufFile` for each tensor. The common types are read by
:mod:`mlsys_orca.model.weights.gguf_blocks`; ``gguf.quants.dequantize`` stays the way for every other type it knows.

On SmolLM2-135M (Q4_1 and Q8_0; 135 M values) the library took 1.05 s and this takes 0.2 s of one core: the difference
is temporaries larger than the caches. A piece of 2^15 values fits them, and torch runs it in one thread: on a host
shared with others a team waits for its slowest thread at every operator, and loading took 20 s instead of 0.9.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.weights.checkpoint import Cut
from mlsys_orca.model.weights.gguf_blocks import GROUPED, covered_blocks
from numpy.typing import NDArray
from torch import Tensor

_PIECE = 1 << 15  # values dequantised at a time

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
