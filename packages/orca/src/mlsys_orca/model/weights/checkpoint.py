"""A file of weights as a model class sees it, whatever its format.

Readers (:mod:`mlsys_orca.model.weights.gguf_file`, :mod:`mlsys_orca.model.weights.safetensors_file`) implement
:class:`Checkpoint`; a model class asks for each tensor by the name its layout gives it and has it written straight
into the memory it computes from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from mlsys_orca.model.weights.quantized import QuantizedMatrix
    from torch import Tensor

Layout = Literal["gguf", "huggingface"]
WeightForm = Literal["float", "packed", "int8", "int4"]  # how matrices are kept; load_model tells what each means
Progress = Callable[[int, int], None]  # (bytes read so far, bytes in all)


class Checkpoint(Protocol):
    """Named tensors on disk."""

    layout: Layout  # whose naming and order of rotary pairs the tensors follow

    @property
    def names(self) -> frozenset[str]:
        """Every tensor's name."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the tensor's shape, outermost dimension first, without reading it."""
        ...

    def nbytes(self, name: str) -> int:
        """Return the tensor's size in the file, in bytes."""
        ...

    def read_into(self, name: str, out: Tensor) -> None:
        """Write the tensor's values, dequantised and cast, into ``out``, a contiguous tensor of its shape."""
        ...

    def quantized(self, name: str) -> QuantizedMatrix | None:
        """Return the tensor's codes and scales, rows [-1, last dimension]; None: it has none, or of another kind."""
        ...
