"""A file of weights as a model class sees it, whatever its format.

Readers (:mod:`mlsys_orca.model.weights.gguf_file`, :mod:`mlsys_orca.model.weights.safetensors_file`) implement
:class:`Checkpoint`; a model class asks for each tensor by the name its layout gives it and has it written straight
into the memory it computes from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from mlsys_orca.model.weights.quantized import QuantizedMatrix
    from torch import Tensor

Layout = Literal["gguf", "huggingface"]
WeightForm = Literal["float", "packed", "int8", "int4"]  # how matrices are kept; load_model tells what each means
Progress = Callable[[int, int], None]  # (bytes read so far, bytes in all)


@dataclass(frozen=True, slots=True)
class Cut:
    """Part of a tensor: ranges along one axis, one after another."""

    axis: int
    ranges: tuple[range, ...]

    @property
    def size(self) -> int:
        """Length of the part along the axis."""
        return sum(map(len, self.ranges))

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part of a tensor of shape ``whole``.

        Example:
            >>> Cut(0, (range(2, 4), range(8, 10))).shape((12, 5))
            (4, 5)
        """
        return (*whole[: self.axis], self.size, *whole[self.axis + 1 :])


@dataclass(frozen=True, slots=True)
class Source:
    """Tensor of a file that a tensor of a :class:`View` is made from."""

    name: str
    cut: Cut | None = None  # None: all of it


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

    def read_into(self, name: str, out: Tensor, cut: Cut | None = None) -> None:
        """Write the values of the tensor, or of part of it, dequantised and cast, into ``out``, contiguous."""
        ...

    def quantized(self, name: str, cut: Cut | None = None) -> QuantizedMatrix | None:
        """Return the codes and scales of the tensor, or of part of it, rows [-1, last dimension].

        None: it has none, or of another kind. A cut of the last dimension parts no group.
        """
        ...


class View:
    """Tensors of a file under other names, or parts of them; a :class:`Checkpoint`.

    Args:
        file: The tensors.
        sources: Where each tensor comes from, by the name that it has here.
    """

    def __init__(self, file: Checkpoint, sources: Mapping[str, Source]) -> None:
        self.layout: Layout = file.layout
        self.file = file
        self._sources = sources

    @property
    def names(self) -> frozenset[str]:
        """Every tensor's name."""
        return frozenset(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the tensor's shape."""
        source = self._sources[name]
        whole = self.file.shape(source.name)
        return whole if source.cut is None or source.cut.axis >= len(whole) else source.cut.shape(whole)

    def nbytes(self, name: str) -> int:
        """Return the bytes that the tensor takes in the file."""
        source = self._sources[name]
        return self.file.nbytes(source.name) * prod(self.shape(name)) // max(1, prod(self.file.shape(source.name)))

    def read_into(self, name: str, out: Tensor, cut: Cut | None = None) -> None:
        """Write the values of the tensor, or of part of it, into ``out``."""
        source = self._sources[name]
        assert cut is None or source.cut is None, "a part is not cut again"
        self.file.read_into(source.name, out, cut or source.cut)

    def quantized(self, name: str, cut: Cut | None = None) -> QuantizedMatrix | None:
        """Return the codes and scales of the tensor, or of part of it, if the file has them."""
        source = self._sources[name]
        assert cut is None or source.cut is None, "a part is not cut again"
        return self.file.quantized(source.name, cut or source.cut)


def renamed(file: Checkpoint, prefixes: Mapping[str, str]) -> View:
    """Return the tensors of ``file`` whose names begin with one of ``prefixes``, which others take the place of."""
    found = {
        other + name.removeprefix(prefix): Source(name)
        for prefix, other in prefixes.items()
        for name in file.names
        if name.startswith(prefix)
    }
    return View(file, found)
