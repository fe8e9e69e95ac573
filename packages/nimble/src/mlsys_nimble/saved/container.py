"""The file: a prefix, a header in JSON, and raw tensors, each at a multiple of 64 bytes.

The prefix holds the format's number, both lengths, and a digest of all that follows it, which detects damage. It is no
signature: what a file says is checked whether or not the digest fits.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling.files import atomic_write
from torch import Tensor

from mlsys_nimble.ir.program import ITEMSIZE
from mlsys_nimble.state.digest import Digest

MAGIC, FORMAT = b"MLSYSNMB", 2  # another one when weights are packed otherwise
MAX_HEADER_NBYTES = 1 << 28
_ALIGNMENT = 64
_PREFIX = struct.Struct("<8sQQQQ")  # magic, format, bytes of the header, bytes of the file, digest
_BEGIN = _ALIGNMENT  # of the header
_AGAIN = "save the model again with model.save(path)"


class TensorTable:
    """Tensors of one file, each memory once."""

    def __init__(self) -> None:
        self.entries: list[list[Any]] = []  # dtype, shape, offset after the header
        self.tensors: list[Tensor] = []
        self.nbytes = 0
        self._known: dict[Any, int] = {}

    def add(self, tensor: Tensor) -> int:
        """Return a tensor's number; it is stored row by row."""
        tensor = tensor.detach().contiguous()
        key = tensor.data_ptr(), tensor.nbytes, tensor.dtype, tuple(tensor.shape)
        if key not in self._known:
            same = self._known.get(key[:2])
            self._known[key] = len(self.entries)
            if same is None or not tensor.nbytes:
                self._known[key[:2]] = len(self.entries)
                offset, self.nbytes = self.nbytes, _aligned(self.nbytes + tensor.nbytes)
            else:
                offset = self.entries[same][2]
            self.entries.append([str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset])
            self.tensors.append(tensor)  # kept alive: addresses are keys
        return self._known[key]


def write_file(path: Path, header: dict[str, Any], table: TensorTable) -> int:
    """Write a file in one rename, and return its size in bytes.

    Raises:
        InvalidInputError: it cannot be written.
    """
    text = json.dumps({**header, "tensors": table.entries}, separators=(",", ":"), allow_nan=False).encode()
    data_begin = _aligned(_BEGIN + len(text))
    nbytes = data_begin + table.nbytes
    try:
        with atomic_write(path) as file:
            file.truncate(nbytes)
            file.seek(_BEGIN)
            file.write(text)
            for (_, _, offset), tensor in zip(table.entries, table.tensors, strict=True):
                file.seek(data_begin + offset)
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as content:
                digest = _digest(torch.frombuffer(content, dtype=torch.uint8))
            file.seek(0)
            file.write(_PREFIX.pack(MAGIC, FORMAT, len(text), nbytes, digest))
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error.strerror or error}") from error
    return nbytes


def read_file(path: Path) -> tuple[dict[str, Any], list[Tensor], int]:
    """Map a file.

    Returns:
        The header; the tensors, in its memory, copied where they are written to; and the digest.

    Raises:
        InvalidInputError: there is none, it is another kind of file or of another version, or it is damaged.
    """
    try:
        size = path.stat().st_size
        data = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c")) if size else torch.empty(0)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidInputError(f"cannot read {path}: {reason}") from error
    if size < _BEGIN or bytes(data[:8].tolist()) != MAGIC:
        raise InvalidInputError(f"{path} is no prepared model; write one with model.save(path)")
    _, version, text_nbytes, nbytes, digest = _PREFIX.unpack(bytes(data[: _PREFIX.size].tolist()))
    if version != FORMAT:
        raise InvalidInputError(f"{path} has format {version}, and this mlsys reads {FORMAT}; {_AGAIN}")
    if size != nbytes or text_nbytes > min(MAX_HEADER_NBYTES, size - _BEGIN):
        raise InvalidInputError(f"{path} has {size:,} bytes of {nbytes:,}: it is cut off; {_AGAIN}")
    if _digest(data) != digest:
        raise InvalidInputError(f"{path} is damaged: its digest does not fit; {_AGAIN}")
    try:
        header = json.loads(data[_BEGIN : _BEGIN + text_nbytes].numpy().tobytes())
        entries = header["tensors"]
        begin = _aligned(_BEGIN + text_nbytes)
        return header, [_tensor(data, begin, *entry) for entry in entries], digest
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError, RuntimeError) as error:
        raise InvalidInputError(f"{path} is no prepared model: its header does not hold together; {_AGAIN}") from error


def _tensor(data: Tensor, begin: int, dtype: str, shape: Sequence[int], offset: int) -> Tensor:
    nbytes = ITEMSIZE[dtype]
    for size in shape:
        if type(size) is not int or size < 0:
            raise ValueError("a shape")
        nbytes *= size
    if type(offset) is not int or offset < 0 or offset % _ALIGNMENT or begin + offset + nbytes > data.numel():
        raise ValueError("an offset")
    first = begin + offset
    if not nbytes:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return data[first : first + nbytes].view(getattr(torch, dtype)).view(shape)


def _digest(content: Tensor) -> int:
    return Digest([content[_BEGIN:]]).read()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
