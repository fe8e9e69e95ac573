"""A packed copy of a GGUF file's weights on disk, mapped by later starts: nothing is decoded or packed again.

The first load of a file packs its matrices and writes them here. A later one reads the file's metadata, norms and
biases; its quantised matrices are tensors without memory (torch's ``meta`` device), which only say their shapes, until
the native decoder puts the mapped parts in their place. Pages are read when they are first used, and processes share
them. A copy is found by what it was made from: the file's identity, and the sources that packed it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from mlsys_core.native.levels import NATIVE, recipe
from mlsys_core.native.store import problem_of
from mlsys_core.profiling.files import atomic_write
from mlsys_orca.backends.native.library import PROGRAM
from mlsys_orca.backends.native.packing import PackedLinear, Rows
from mlsys_orca.model.blocks import Decoder
from mlsys_orca.model.layers import Linear
from mlsys_orca.model.weights.checkpoint import Checkpoint, Cut, Source, View
from mlsys_orca.model.weights.quantized import PARTS, QuantizedMatrix
from numpy.typing import NDArray
from torch import Tensor

_log = logging.getLogger(__name__)

MAGIC, FORMAT, SUFFIX = b"MLSYSPK1", 3, ".packed"
_ALIGNMENT = 4096
_LEAST_NBYTES = 16 << 20  # smaller files load as quickly without
_WRITE_NBYTES = 8 << 20  # of one write, whole huge pages
_NUM_PROBES, _PROBE_NBYTES = 256, 4096


@dataclass(frozen=True, slots=True)
class Kept:
    """An open copy: every quantised product's packed parts, in the order of the plan, and the embedding's table."""

    header: dict[str, Any]
    data: Tensor  # uint8: the file, mapped copy-on-write, since torch views no memory that it may not write

    def linear(self, number: int, bias: Tensor | None, *, takes_bf16: bool) -> PackedLinear:
        """Return product ``number`` of the plan."""
        entry = self.header["linears"][number]
        parts = self._parts(entry)
        return PackedLinear(
            entry["kind"], entry["k"], bias=bias, takes_bf16=takes_bf16, centre=entry["centre"], **parts
        )

    def table(self) -> QuantizedMatrix | None:
        """Return the embedding's table, if that is quantised."""
        if self.header["table"] is None:
            return None
        return QuantizedMatrix(**self._parts(self.header["table"]))

    def matrix(self, name: str) -> QuantizedMatrix | None:
        """Return the shapes of tensor ``name`` of the file, without memory; None: it was not quantised."""
        if name not in self.header["matrices"]:
            return None
        entry = self.header["matrices"][name]
        parts: dict[str, Any] = {"offsets": None}
        for part in PARTS:
            if entry[part] is not None:
                kind, shape = entry[part]
                parts[part] = torch.empty(shape, dtype=_dtype(kind), device="meta")
        return QuantizedMatrix(**parts)

    def _parts(self, entry: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part in PARTS:
            if entry[part] is None:
                found[part] = None
                continue
            kind, shape, offset = entry[part]
            dtype = _dtype(kind)
            nbytes = dtype.itemsize * int(np.prod(shape))
            found[part] = self.data[offset : offset + nbytes].view(dtype).view(shape)
        return found


def is_without_memory(weight: object) -> bool:
    """Return whether a product's weight only says its shape, so that its packed parts are in a copy."""
    return isinstance(weight, QuantizedMatrix) and weight.device.type == "meta"


class NotedCheckpoint(View):
    """A GGUF file whose quantised tensors come from a copy, or are noted for one that is to be written.

    Args:
        file: The tensors.
        kept: The copy; None: there is none yet.

    Attributes:
        matrices: Shapes of the quantised tensors that were handed out from the file, by name.
        num_values: Values of all of them.
    """

    def __init__(self, file: Checkpoint, kept: Kept | None) -> None:
        super().__init__(file, {name: Source(name) for name in file.names})
        self._kept = kept
        self.matrices: dict[str, dict[str, Any]] = {}
        self.num_values = 0

    def quantized(self, name: str, cut: Cut | None = None) -> QuantizedMatrix | None:
        """Return the tensor's shapes if the copy has its values; else its codes and scales, as the file's."""
        assert cut is None, "copies are kept of whole models"
        if self._kept is not None:
            return self._kept.matrix(name)
        found = self.file.quantized(name)
        if found is not None:
            self.matrices[name] = {part: _described(getattr(found, part)) for part in PARTS}
            self.num_values += found.out_features * found.in_features
        return found


@dataclass(frozen=True, slots=True)
class Copies:
    """The folder of copies.

    Attributes:
        folder: Made when something is first kept.
        most_nbytes: The least recently used copies go where all of them would have more.
    """

    folder: Path
    most_nbytes: int

    def path_of(self, source: Path, *, activations: Rows = "float") -> Path | None:
        """Return where the copy of ``source`` is or will be, packed for rows in that form.

        None: none is kept of so small a file, or none at all.
        """
        size = source.stat().st_size
        if self.most_nbytes <= size or size < _LEAST_NBYTES or problem_of(self.folder.resolve()):
            return None
        return self.folder / f"{source.stem[:60]}-{_identity(source, activations)}{SUFFIX}"

    def find(self, path: Path) -> Kept | None:
        """Open the copy at ``path``; None if there is none, or it is not whole."""
        try:
            data = np.memmap(path, dtype=np.uint8, mode="c")
            length = int.from_bytes(bytes(data[8:16]), "little")
            header = json.loads(bytes(data[16 : 16 + length])) if bytes(data[:8]) == MAGIC else {}
            if header.get("nbytes") != len(data) or header.get("format") != FORMAT:
                return None
            os.utime(path)  # the order in which copies go
        except (OSError, ValueError):
            return None
        return Kept(header, torch.from_numpy(data))

    def keep(
        self,
        path: Path,
        linears: Sequence[PackedLinear | None],
        table: QuantizedMatrix | None,
        noted: NotedCheckpoint,
    ) -> bool:
        """Write a copy; return False, with a log line, where it cannot be written.

        Args:
            path: From :meth:`path_of`.
            linears: Every product of the plan; None: one whose weight was not quantised.
            table: The embedding's, if that is quantised.
            noted: What the file handed out.
        """
        position, parts = 0, list[tuple[int, Tensor]]()

        def placed(entry: Any) -> dict[str, Any]:
            nonlocal position
            found: dict[str, Any] = {}
            for part in PARTS:
                tensor = getattr(entry, part)
                if tensor is None:
                    found[part] = None
                    continue
                tensor = tensor.contiguous()
                parts.append((position, tensor))
                found[part] = [*(_described(tensor) or ()), position]
                position = _aligned(position + tensor.nbytes)
            return found

        entries: list[Any] = [
            None if each is None else {"kind": each.kind, "k": each.k, "centre": each.centre, **placed(each)}
            for each in linears
        ]
        placed_table = None if table is None else placed(table)
        header = {"format": FORMAT, "linears": entries, "table": placed_table, "matrices": noted.matrices, "nbytes": 0}
        start = _aligned(len(json.dumps(header)) * 2 + 4096)  # offsets below are from here: room for the header itself
        for part in [entry[part] for entry in [*entries, placed_table] if entry for part in PARTS]:
            if part is not None:
                part[2] += start
        header["nbytes"] = start + position
        text = json.dumps(header).encode()
        try:
            self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            self._make_room(start + position)
            with atomic_write(path) as file:
                head = MAGIC + len(text).to_bytes(8, "little") + text
                written = [(start + offset, tensor.view(torch.uint8).numpy().ravel()) for offset, tensor in parts]
                _write(file, [(0, np.frombuffer(head, np.uint8)), *written], start + position)
        except OSError as error:
            _log.info("no packed copy is kept in %s: %s", self.folder, error.strerror or error)
            return False
        return True

    def _make_room(self, nbytes: int) -> None:
        """Remove the least recently used copies until ``nbytes`` more are within the bound.

        Raises:
            OSError: the disk has not twice as much room.
        """
        copies = sorted(self.folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
        total = sum(path.stat().st_size for path in copies)
        for path in copies:
            if total + nbytes <= self.most_nbytes:
                break
            total -= path.stat().st_size
            path.unlink(missing_ok=True)
        if shutil.disk_usage(self.folder).free < 2 * nbytes:
            raise OSError(f"the disk has no room for {2 * nbytes:,} bytes")


def _identity(source: Path, activations: str) -> str:
    """Return a hash of what ``source`` is: its size and times, bytes from all over it, and what packs it.

    All of a large file is not read: that would take as long as loading it. Its time of change (ctime) cannot be set,
    so an edit in place is noticed though it keeps size and time of modification.
    """
    status = source.stat()
    own = ("kept.py", "packing.py", "lowering.py", "plan_writer.py", "binding.py")
    code = [Path(__file__).with_name(name) for name in own]
    weights = Path(__file__).parents[2] / "model" / "weights"
    code += [weights / "gguf_blocks.py", weights / "quantized.py"]
    key = recipe(PROGRAM.source, NATIVE, headers=PROGRAM.headers).key
    times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
    digest = hashlib.sha256(f"{FORMAT} {activations} {key} {status.st_size} {times}".encode())
    for file in code:
        digest.update(file.read_bytes())
    with source.open("rb") as file_:
        digest.update(file_.read(1 << 20))
        step = max(1, status.st_size // _NUM_PROBES)
        for offset in range(0, status.st_size, step):
            file_.seek(offset)
            digest.update(file_.read(_PROBE_NBYTES))
    return digest.hexdigest()[:16]


def can_be_kept(model: object, noted: NotedCheckpoint) -> bool:
    """Return whether every quantised tensor of the file is in a product of the plan or in the embedding's table.

    A tensor may also have been made floating, beside one that is, or have gone to a part that is no product.
    """
    if not isinstance(model, Decoder) or not noted.matrices:
        return False
    weights = [model.embedding.table, *(each.weight for each in model.modules() if isinstance(each, Linear))]
    matrices = [weight for weight in weights if isinstance(weight, QuantizedMatrix)]
    sizes = {each.codes.data_ptr(): each.out_features * each.in_features for each in matrices}
    return sum(sizes.values()) == noted.num_values  # each once, however many products share it


def _write(file: BinaryIO, parts: Sequence[tuple[int, NDArray[np.uint8]]], nbytes: int) -> None:
    """Write ``parts`` by ascending offset, zeros between them, up to ``nbytes``.

    All writes are of whole huge pages. File systems with large folios (ext4 since Linux 6.16, XFS) then keep huge pages
    of the file and map them as such, where a thread reads half again as fast as from pages of 4 KiB.
    """
    number = 0
    for begin in range(0, nbytes, _WRITE_NBYTES):
        chunk = np.zeros(min(_WRITE_NBYTES, nbytes - begin), np.uint8)
        end = begin + len(chunk)
        while number < len(parts) and parts[number][0] < end:
            offset, part = parts[number]
            some = part[max(0, begin - offset) : end - offset]
            at = max(0, offset - begin)
            chunk[at : at + len(some)] = some
            if offset + len(part) > end:
                break  # the rest of it is in the next chunk
            number += 1
        file.write(chunk.data)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _described(tensor: Tensor | None) -> list[Any] | None:
    return None if tensor is None else [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
