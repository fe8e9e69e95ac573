"""Write a model as a GGUF file of fewer bits: ``mlsys orca quantize``.

The whole file is planned first (:func:`plan`): every name, shape and type, so that what cannot be written is refused
before work starts. Then one tensor after another is read, quantised and written (:func:`write`); memory holds one at a
time, and of a large one some rows. The file takes its place when it is whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling.files import atomic_path
from mlsys_orca.backends.runner import intra_op_threads
from mlsys_orca.loading.load import model_files
from mlsys_orca.model.weights.damage import readable
from numpy.typing import NDArray

from mlsys_gguf_tools.blocks import encode_into, nbytes_of
from mlsys_gguf_tools.gguf import open_file
from mlsys_gguf_tools.huggingface import open_directory
from mlsys_gguf_tools.source import Source, SourceTensor
from mlsys_gguf_tools.types import FileType, Mix, file_type

Progress = Callable[[int, int], None]  # (values written so far, values in all)
_ROWS = 1 << 26  # values of a tensor in memory at a time: 256 MiB in fp32
_QUANTIZATION_VERSION = 2  # of GGML's blocks


@dataclass(frozen=True, slots=True)
class Plan:
    """A file to be written."""

    source: Source
    file_type: FileType
    types: tuple[GGMLQuantizationType, ...]  # of the source's tensors

    @property
    def num_values(self) -> int:
        """Values of all tensors."""
        return sum(prod(tensor.shape) for tensor in self.source.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the file."""
        pairs = zip(self.source.tensors, self.types, strict=True)
        return sum(nbytes_of(tensor.shape, kind) for tensor, kind in pairs)

    @property
    def bits_per_weight(self) -> float:
        """Bits of a value, on average."""
        return 8 * self.nbytes / self.num_values


def plan(path: Path | str, out: Path | str, kind: str, *, overwrite: bool = False) -> Plan:
    """Return what :func:`write` will write, without reading a weight.

    Args:
        path: A Hugging Face directory, a GGUF file, or a directory with a single one.
        out: The file to write.
        kind: A name of :data:`.types.FILE_TYPES`.
        overwrite: True if there may be such a file already.

    Raises:
        InvalidInputError: the type is unknown, the model is damaged or cannot be said in a GGUF, or ``out`` is no place
            for it.
    """
    wanted, target = file_type(kind), Path(out).expanduser()
    where, _ = model_files(path)
    if target.suffix != ".gguf" or not target.parent.is_dir() or target.is_dir():
        raise InvalidInputError(f"{target} is no place for a GGUF file: give a .gguf in a directory that exists")
    if target.exists() and (not overwrite or (where.is_file() and target.samefile(where))):
        raise InvalidInputError(f"{target} exists; give another name, or --overwrite if it is not the model itself")
    with readable(where):
        source = open_directory(where) if where.is_dir() else open_file(where)
    mix = Mix(
        file_type=wanted,
        num_layers=source.num_layers,
        num_experts=source.num_experts,
        has_head=any(tensor.name == "output.weight" for tensor in source.tensors),
    )
    found = Plan(source, wanted, tuple(mix.of(tensor.name, tensor.shape) for tensor in source.tensors))
    if (free := shutil.disk_usage(target.parent).free) < found.nbytes:
        raise InvalidInputError(f"{target.parent} has {free:,} bytes left, and the file needs {found.nbytes:,}")
    return found


def write(planned: Plan, out: Path | str, *, num_threads: int = 1, progress: Progress | None = None) -> None:
    """Write the planned file.

    Args:
        planned: What :func:`plan` returned.
        out: The file; it appears, or is replaced, when it is whole.
        num_threads: Threads that quantise.
        progress: Called with the values written so far and those in all.

    Raises:
        InvalidInputError: the model's files turn out to be damaged, or ``out`` cannot be written.
    """
    target = Path(out).expanduser()
    try:
        with (
            atomic_path(target) as part,
            ThreadPoolExecutor(num_threads) as threads,
            intra_op_threads(1),
        ):
            _write(planned, part, threads, progress or _ignore)
    except OSError as error:
        raise InvalidInputError(f"{target} cannot be written: {error.strerror or error}") from error


def _write(planned: Plan, part: Path, threads: Executor, progress: Progress) -> None:
    source = planned.source
    writer = GGUFWriter(part, source.architecture)
    for each in source.entries:
        if each.key != "general.architecture":  # which the writer has added
            writer.add_key_value(each.key, each.value, each.kind, each.item_kind)
    writer.add_file_type(planned.file_type.id)
    writer.add_quantization_version(_QUANTIZATION_VERSION)
    pairs = list(zip(source.tensors, planned.types, strict=True))
    for tensor, kind in pairs:
        nbytes = nbytes_of(tensor.shape, kind)
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), nbytes, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done = 0
        for tensor, kind in pairs:
            count = partial(_count, progress, done, planned.num_values)
            writer.write_tensor_data(_coded(tensor, kind, threads, count))
            done += prod(tensor.shape)
    finally:
        writer.close()


def _coded(
    tensor: SourceTensor, kind: GGMLQuantizationType, threads: Executor, progress: Callable[[int], None]
) -> NDArray[np.uint8]:
    """Return the bytes of ``tensor`` in type ``kind``."""
    if tensor.coded is not None and tensor.coded[0] == kind:
        progress(prod(tensor.shape))
        return tensor.coded[1]()
    out = np.empty(nbytes_of(tensor.shape, kind), np.uint8)
    num_rows, row_len = tensor.shape[0], prod(tensor.shape[1:])
    step = max(1, _ROWS // row_len) if len(tensor.shape) > 1 and tensor.is_cheap_in_parts else num_rows
    block_len, block_nbytes = GGML_QUANT_SIZES[kind]
    for start in range(0, num_rows, step):
        rows = range(start, min(start + step, num_rows))
        values = tensor.read(rows).contiguous()
        if not torch.isfinite(values).all():
            raise InvalidInputError(f"{tensor.name!r} has values that are not finite: the model is damaged")
        first, last = (row * row_len // block_len * block_nbytes for row in (rows.start, rows.stop))
        encode_into(values, kind, out[first:last], threads)
        progress(rows.stop * row_len)
    return out


def _count(progress: Progress, before: int, total: int, done: int) -> None:
    progress(before + done, total)


def _ignore(done: int, total: int) -> None:
    pass
