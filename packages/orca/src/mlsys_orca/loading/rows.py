"""The form in which rows meet packed weights: by model, chosen once, before a weight is read (ADR 33).

Between the loaders, which know the file's table of tensors, and the native decoder, which is told ``"int8"`` or
``"float"``. Small models are the ones whose answers rounding changes; large ones gain the most.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Literal

from mlsys_core.errors import MlsysError

from mlsys_orca.backends.native import library
from mlsys_orca.backends.native.packing import Rows
from mlsys_orca.model.weights.checkpoint import Checkpoint
from mlsys_orca.model.weights.gguf_blocks import GROUPED
from mlsys_orca.model.weights.gguf_file import GgufFile

Activations = Literal["auto", "float", "int8"]  # as they are asked for
LEAST_WEIGHTS = 500_000_000  # in codes, of the layers' projections: from here on ``auto`` quantises rows
_IN_A_LAYER = re.compile(r"\.\d+\.")
_FP32 = ("fp32", "float32")


@dataclass(frozen=True, slots=True)
class RowsChoice:
    """The form of a model's rows, and why."""

    form: Rows
    why: str  # a clause, for people

    def __str__(self) -> str:
        return f"{self.form} ({self.why})"


def choose_rows(
    asked: Activations | None, *, num_coded: int, dtype: str | None = None, is_amx: bool = False
) -> RowsChoice:
    """Return the form of rows for a model; pure, and blind to batches, so that all of them have the same bits.

    Args:
        asked: As given; None is ``"auto"``.
        num_coded: Weights of the layers' projections that are codes in memory (:func:`count_coded`).
        dtype: As given; None: the machine's.
        is_amx: The machine multiplies tiles of bf16.

    Example:
        >>> choose_rows(None, num_coded=968_884_224).form, choose_rows(None, num_coded=106_168_320).form
        ('int8', 'float')
        >>> choose_rows("auto", num_coded=968_884_224, dtype="fp32").form
        'float'
    """
    if asked in ("float", "int8"):
        return RowsChoice(asked, "as asked for")
    if dtype in _FP32:
        return RowsChoice("float", "auto: fp32 was asked for, which rounds nothing")
    if not num_coded:
        return RowsChoice("float", "auto: the weights are floats")
    size, least = f"{num_coded / 1e6:,.0f} million quantised weights in layers", f"{LEAST_WEIGHTS // 10**6} million"
    if num_coded < LEAST_WEIGHTS:
        return RowsChoice("float", f"auto: {size}, below {least}")
    if is_amx:
        return RowsChoice("float", "auto: this machine has AMX, which multiplies bf16")
    return RowsChoice("int8", f"auto: {size}, at least {least}")


def rows_of(
    where: Path, asked: Activations | None, *, dtype: str | None, weights: str | None, file: Checkpoint | None = None
) -> RowsChoice:
    """Return the form of rows for the native model at ``where``, on this machine.

    Args:
        where: A GGUF file or a directory.
        asked: As given.
        dtype: As given.
        weights: Form of matrices, as given.
        file: ``where``, open; None: it is opened.

    Raises:
        InvalidInputError: the files are damaged.
    """
    if asked in ("float", "int8"):
        return choose_rows(asked, num_coded=0)
    if weights == "float" or (where.is_dir() and weights not in ("int8", "int4")):
        return choose_rows(asked, num_coded=0, dtype=dtype)
    status = where.stat()
    num_coded = count_coded(file, weights) if file else _count_at(where, weights, status.st_mtime_ns, status.st_size)
    return choose_rows(asked, num_coded=num_coded, dtype=dtype, is_amx=_has_amx())


def count_coded(files: Checkpoint, weights: str | None) -> int:
    """Return how many weights of the layers' matrices are codes in memory; tables and head are in no layer.

    Args:
        files: The model's tensors.
        weights: ``"int8"`` or ``"int4"``: all are quantised; else those that the file has in blocks that kernels take.
    """
    names = [name for name in files.names if _IN_A_LAYER.search(name)]
    if weights not in ("int8", "int4"):
        if not isinstance(files, GgufFile):
            return 0
        names = [name for name in names if files.tensors[name].type in GROUPED]
    return sum(prod(shape) for shape in map(files.shape, names) if len(shape) > 1)


@lru_cache(8)
def _count_at(where: Path, weights: str | None, *_identity: int) -> int:
    """Return the count of a file, of which each process that holds a part asks again."""
    if not where.is_dir():
        return count_coded(GgufFile(where), weights)
    from mlsys_orca.model.weights.safetensors_file import SafetensorsDirectory

    return count_coded(SafetensorsDirectory(where), weights)


def _has_amx() -> bool:
    try:
        return bool(library.load().orca_has_amx())
    except MlsysError:  # there are no kernels, and so no whole numbers either
        return False
