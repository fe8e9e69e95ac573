"""Memory that a model's weights will take, told from its files' tables before a weight is read."""

from __future__ import annotations

from math import prod

from mlsys_orca.loading.load import DTYPES
from mlsys_orca.model.weights.checkpoint import Checkpoint

_BITS = {"int8": 8, "int4": 4}
_FULL_BITS = 16  # of a value that is not quantised, at least


def weights_nbytes_at_least(files: Checkpoint, *, dtype: str, weights: str) -> int:
    """Return the bytes that the weights of ``files`` take in memory, at least: without what packing adds.

    Args:
        files: The model's tensors.
        dtype: ``"fp32"`` or ``"bf16"``.
        weights: ``"float"``, ``"packed"``, ``"int8"`` or ``"int4"``.
    """
    total = 0
    for name in files.names:
        shape, nbytes = files.shape(name), files.nbytes(name)
        count = prod(shape)
        if weights == "packed" and 8 * nbytes < _FULL_BITS * count:
            total += nbytes
        elif weights in _BITS and len(shape) > 1:
            total += count * _BITS[weights] // 8
        else:
            total += count * DTYPES[dtype].itemsize
    return total
