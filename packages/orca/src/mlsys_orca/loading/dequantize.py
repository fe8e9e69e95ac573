"""Quantised blocks of a GGUF tensor to floating values, in place and in cache-sized pieces.

Called by :class:`mlsys_orca.loading.gguf_file.GgufFile` for each tensor. The common types are done here in torch; the
values are bit for bit those of ``gguf.quants.dequantize``, which stays the way for every other type it knows.

On SmolLM2-135M (Q4_1 and Q8_0; 135 M values) the library took 1.05 s and this takes 0.2 s of one core: the difference
is temporaries larger than the caches. A piece of 2^15 values fits them, and torch runs it in one thread: on a host
shared with others a team waits for its slowest thread at every operator, and loading took 20 s instead of 0.9.

Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from mlsys_core.errors import InvalidInputError
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
        kind: How they are coded; one that :func:`check_types` accepts.
        out: Where the values go: contiguous, floating, with as many elements as ``data`` codes.
    """
    flat = out.view(-1)
    if dtype := _PLAIN.get(kind):
        flat.copy_(torch.from_numpy(data.copy()).view(dtype))  # a copy, since the file's offset may not suit the type
        return
    block_len, block_nbytes = GGML_QUANT_SIZES[kind]
    blocks = torch.from_numpy(data).view(-1, block_nbytes)
    values = flat.view(-1, block_len)
    decode = _DECODERS.get(kind) or _library_decoder(kind)
    for start in range(0, len(blocks), step := max(1, _PIECE // block_len)):
        decode(blocks[start : start + step], values[start : start + step])


def _half(blocks: Tensor, start: int) -> Tensor:
    """The fp16 scalar at byte ``start`` of each block, as fp32 [num_blocks, 1, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()[:, None]


def _nibbles(codes: Tensor) -> Tensor:
    """4-bit codes of 16 bytes per block, [num_blocks, 2, 16]: value i in byte i's low half, 16 + i in its high half."""
    return torch.stack((codes & 15, codes >> 4), dim=1)


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    """Scale (fp16), then 32 signed bytes."""
    out.copy_(blocks[:, 2:].view(torch.int8) * _half(blocks, 0)[:, 0])


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    """Scale (fp16), then 32 codes, centred at 8."""
    out.view(-1, 2, 16).copy_((_nibbles(blocks[:, 2:]).to(torch.int8) - 8) * _half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    """Scale and minimum (fp16), then 32 codes."""
    out.view(-1, 2, 16).copy_((_nibbles(blocks[:, 4:]) * _half(blocks, 0)).add_(_half(blocks, 2)))


_DECODERS: dict[GGMLQuantizationType, Callable[[Tensor, Tensor], None]] = {
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
}


def check_types(kinds: Iterable[GGMLQuantizationType]) -> None:
    """See that :func:`dequantize_into` can read ``kinds``, before any tensor is read.

    Raises:
        InvalidInputError: one is a type that neither this module nor the ``gguf`` library dequantises.
    """
    for kind in set(kinds) - set(_PLAIN) - set(_DECODERS):
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            raise InvalidInputError(
                f"tensors of type {kind.name} cannot be read; F32, F16, BF16, Q4_0, Q4_1, Q8_0 and whatever else the "
                "installed gguf library dequantises can"
            ) from None


def _library_decoder(kind: GGMLQuantizationType) -> Callable[[Tensor, Tensor], None]:
    """The ``gguf`` library's own dequantisation, as a decoder of pieces."""

    def decode(blocks: Tensor, out: Tensor) -> None:
        out.copy_(torch.from_numpy(dequantize(blocks.numpy(), kind)))

    return decode
