"""Read a GGUF file: its metadata, its table of tensors, and the tensors' bytes on demand.

First stage of loading a GGUF: bytes in, plain Python values and byte views out; :mod:`mlsys_orca.loading.gguf` gives
them meaning. The header is parsed here and not by ``gguf.GGUFReader``, which makes two numpy arrays for each entry of
the vocabulary: it takes 1.9 s on a 49,152-token vocabulary where this takes 0.1 s. Type ids and block sizes do come
from the ``gguf`` library. Every length is checked against the file's size before it is followed.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.weights.checkpoint import Cut, Layout

if TYPE_CHECKING:
    from mlsys_orca.model.weights.quantized import QuantizedMatrix
    from numpy.typing import NDArray
    from torch import Tensor

MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
# Value type id -> struct code; 8 is a string and 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DEFAULT_ALIGNMENT = 32  # bytes
_MAX_ALIGNMENT = 1 << 20
# Of one file; many times what is known. A file may be sparse, so its size bounds no number of entries.
_MAX_PAIRS, _MAX_TENSORS, _MAX_ITEMS = 1 << 16, 1 << 18, 1 << 23
_MAX_STRING_NBYTES = 1 << 24
_MAX_HEADER_NBYTES = 1 << 29
_MAX_RANK = 4  # as in ggml


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One line of the file's table of tensors."""

    name: str
    shape: tuple[int, ...]  # outermost dimension first (the file has them reversed)
    type: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    nbytes: int


class _Cursor:
    """A position in the file that never moves past its end."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self._data = data[:_MAX_HEADER_NBYTES]
        self._path = path
        self._num_items = 0  # of all lists
        self.position = 0

    def take(self, nbytes: int) -> memoryview:
        start, self.position = self.position, self.position + nbytes
        if self.position > _MAX_HEADER_NBYTES:
            raise self.damaged(f"what stands before its tensors has more than {_MAX_HEADER_NBYTES:,} bytes")
        if self.position > len(self._data):
            raise InvalidInputError(
                f"{self._path} is truncated or damaged: it needs bytes up to {self.position:,} and has "
                f"{len(self._data):,}; download it again"
            )
        return self._data[start : self.position]

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        nbytes = self.counted("bytes in a text", self.scalar("Q"), _MAX_STRING_NBYTES)
        return str(self.take(nbytes), encoding="utf-8", errors="replace")

    def counted(self, what: str, count: int, most: int) -> int:
        """Return ``count`` if it is plausible; refuse the file if not."""
        if count > most:
            raise self.damaged(f"it says there are {count:,} {what}, and no file has more than {most:,}")
        return count

    def damaged(self, reason: str) -> InvalidInputError:
        return InvalidInputError(f"{self._path} is damaged: {reason}; download it again")

    def strings(self, count: int) -> list[str]:
        """Read ``count`` strings in a row. Vocabularies have a hundred thousand, so this loop calls little."""
        length_at, data, position = struct.Struct("<Q").unpack_from, self._data, self.position
        found: list[str] = []
        while len(found) < count and position + 8 <= len(data):
            start = position + 8
            position = start + length_at(data, position)[0]
            found.append(str(data[start:position], "utf-8", "replace"))
        self.take(position - self.position if len(found) == count else len(data) + 1)
        return found

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            item_type, count = self.scalar("I"), self.scalar("Q")
            self._num_items += count
            self.counted("items in lists", self._num_items, _MAX_ITEMS)
            if item_type == _ARRAY:
                raise self.damaged("it has lists in a list, which no model's metadata has")
            if code := _SCALARS.get(item_type):
                return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(code))))
            if item_type == _STRING:
                return self.strings(count)
            raise self.damaged(f"it has a list of type {item_type}, known are 0 to 12")
        if code := _SCALARS.get(type_id):
            return self.scalar(code)
        raise self.damaged(f"it has metadata of type {type_id}, known are 0 to 12")


class GgufFile:
    """An open GGUF file, memory-mapped; a :class:`~mlsys_orca.model.weights.checkpoint.Checkpoint`.

    Args:
        path: The file.

    Raises:
        InvalidInputError: it is no GGUF file, truncated, of another version, or has tensors of a type that
            the installed gguf library does not know.
    """

    layout: Layout = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        # Copy-on-write, since torch refuses to view memory it may not write; nothing here writes.
        self._bytes = np.memmap(path, dtype=np.uint8, mode="c") if path.stat().st_size else np.empty(0, np.uint8)
        cursor = _Cursor(self._bytes.data, path)
        if len(self._bytes) < len(MAGIC) or bytes(cursor.take(len(MAGIC))) != MAGIC:
            raise InvalidInputError(f"{path} is not a GGUF file: it does not start with the bytes 'GGUF'")
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise InvalidInputError(f"{path} is GGUF version {version}; versions 2 and 3, little-endian, can be read")
        num_tensors = cursor.counted("tensors", cursor.scalar("Q"), _MAX_TENSORS)
        num_pairs = cursor.counted("entries of metadata", cursor.scalar("Q"), _MAX_PAIRS)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = cursor.string()
            if key in self.metadata:
                raise cursor.damaged(f"it has {key[:100]!r} twice")
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        self.tensors: dict[str, TensorEntry] = {}
        end = 0
        for entry in sorted(self._read_table(cursor, num_tensors), key=lambda entry: entry.offset):
            if entry.name in self.tensors:
                raise cursor.damaged(f"it has the tensor {entry.name[:100]!r} twice")
            if entry.offset < end:
                raise cursor.damaged(f"the tensor {entry.name[:100]!r} overlaps the one before it")
            self.tensors[entry.name] = entry
            end = entry.offset + entry.nbytes
        if end > len(self._bytes):
            raise InvalidInputError(
                f"{path} is truncated: its tensors end at byte {end:,} and it has {len(self._bytes):,}; "
                "download it again"
            )

    def _read_table(self, cursor: _Cursor, num_tensors: int) -> list[TensorEntry]:
        lines = []
        for _ in range(num_tensors):
            name = cursor.string()
            rank = cursor.counted("dimensions of a tensor", cursor.scalar("I"), _MAX_RANK)
            dims = struct.unpack(f"<{rank}Q", cursor.take(8 * rank))
            lines.append((name, dims[::-1], cursor.scalar("I"), cursor.scalar("Q")))
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= _MAX_ALIGNMENT:
            raise cursor.damaged(f"its alignment is {str(alignment)[:50]}")
        data_start = -(-cursor.position // alignment) * alignment
        return [self._entry(name, shape, type_id, data_start + offset) for name, shape, type_id, offset in lines]

    def _entry(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> TensorEntry:
        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            raise InvalidInputError(
                f"{self.path}: tensor {name!r} is of ggml type {type_id}, unknown to the installed gguf library"
            ) from None
        block_len, block_nbytes = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block_len or prod(shape) < 1:
            raise InvalidInputError(
                f"{self.path} is damaged: {name[:100]!r} is {list(shape)}, its rows in blocks of {block_len}"
            )
        return TensorEntry(name, shape, kind, offset, prod(shape) // block_len * block_nbytes)

    @property
    def names(self) -> frozenset[str]:
        """Every tensor's name."""
        return frozenset(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the tensor's shape, outermost dimension first."""
        return self.tensors[name].shape

    def nbytes(self, name: str) -> int:
        """Return the tensor's size in the file, in bytes."""
        return self.tensors[name].nbytes

    def read_into(self, name: str, out: Tensor, cut: Cut | None = None) -> None:
        """Dequantise the tensor, or part of it, into ``out``, contiguous, of its shape and any floating dtype."""
        from mlsys_orca.model.weights.gguf_blocks import dequantize_into, dequantize_part_into

        entry = self.tensors[name]
        if cut is None:
            dequantize_into(self.data(name), entry.type, out)
        else:
            dequantize_part_into(self.data(name), entry.type, entry.shape, cut, out)

    def quantized(self, name: str, cut: Cut | None = None) -> QuantizedMatrix | None:
        """Return the codes and scales of the tensor, or of part of it, rows [-1, last dimension].

        None: it has none, or of another kind.
        """
        from mlsys_orca.model.weights.gguf_blocks import GROUPED, quantized_matrix, quantized_part

        entry = self.tensors[name]
        if entry.type not in GROUPED:
            return None
        if cut is None:
            return quantized_matrix(self.data(name), entry.type, entry.shape[-1])
        return quantized_part(self.data(name), entry.type, entry.shape, cut)

    def data(self, name: str) -> NDArray[np.uint8]:
        """Return the bytes of the tensor, as the file has them; a view."""
        entry = self.tensors[name]
        return self._bytes[entry.offset : entry.offset + entry.nbytes]
