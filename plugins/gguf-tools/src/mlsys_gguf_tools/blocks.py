"""Values to the bytes of a GGUF tensor, piece by piece on several threads.

Called by :mod:`.writing` for each tensor. K-quants are :mod:`.k_quants`'; the ``gguf`` library writes the other types.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize
from numpy.typing import NDArray
from torch import Tensor

from mlsys_gguf_tools.k_quants import q4_k, q5_k, q6_k

_PIECE = 1 << 17  # values quantised at a time: their temporaries fit the caches

_K_QUANTS: dict[GGMLQuantizationType, Callable[[Tensor], Tensor]] = {
    GGMLQuantizationType.Q4_K: q4_k,
    GGMLQuantizationType.Q5_K: q5_k,
    GGMLQuantizationType.Q6_K: q6_k,
}


def nbytes_of(shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    """Return the bytes of a tensor of that shape and type.

    Example:
        >>> nbytes_of((2, 256), GGMLQuantizationType.Q4_K)
        288
    """
    block_len, block_nbytes = GGML_QUANT_SIZES[kind]
    return int(np.prod(shape, dtype=np.int64)) // block_len * block_nbytes


def encode_into(values: Tensor, kind: GGMLQuantizationType, out: NDArray[np.uint8], threads: Executor) -> None:
    """Write the bytes of ``values`` in type ``kind`` into ``out``.

    Args:
        values: fp32, contiguous, of a whole number of blocks.
        kind: A type of :data:`.types.FILE_TYPES`, or what stands in for one.
        out: As many bytes as :func:`nbytes_of` says.
        threads: Take a piece each.
    """
    block_len, block_nbytes = GGML_QUANT_SIZES[kind]
    blocks, coded = values.view(-1, block_len), out.reshape(-1, block_nbytes)
    step = max(1, _PIECE // block_len)

    def encode(start: int) -> None:
        piece = blocks[start : start + step]
        if write := _K_QUANTS.get(kind):
            with torch.inference_mode():
                coded[start : start + step] = write(piece).numpy()
        else:
            coded[start : start + step] = quantize(piece.numpy(), kind).view(np.uint8).reshape(len(piece), -1)

    for _ in threads.map(encode, range(0, len(blocks), step)):
        pass
