"""A model to be written as a GGUF file: its metadata and its tensors under GGUF's names, read when they are wanted.

:mod:`.huggingface` makes one of a directory, :mod:`.gguf` of a file; :mod:`.writing` writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a file's metadata."""

    key: str
    value: Any
    kind: GGUFValueType
    item_kind: GGUFValueType | None = None  # of a list


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor."""

    name: str  # GGUF's
    shape: tuple[int, ...]  # outermost dimension first
    read: Callable[[range], Tensor]  # of rows (of the first dimension) -> fp32 [rows, ...]
    is_cheap_in_parts: bool = True  # False: to read some rows costs as much as to read all
    coded: tuple[GGMLQuantizationType, Callable[[], NDArray[np.uint8]]] | None = None  # a file's type and bytes


@dataclass(frozen=True, slots=True)
class Source:
    """One model."""

    architecture: str  # general.architecture
    num_layers: int
    num_experts: int  # 0: none
    entries: tuple[Entry, ...]
    tensors: tuple[SourceTensor, ...]
    is_quantised: bool  # its matrices have lost something already


def entry(key: str, value: Any) -> Entry:
    """Return a line whose type is the one that GGUF's keys of that kind of value have."""
    if isinstance(value, list):
        return Entry(key, value, GGUFValueType.ARRAY, GGUFValueType.get_type(value[0]))
    kind = GGUFValueType.get_type(value)
    return Entry(key, value, GGUFValueType.UINT32 if kind == GGUFValueType.INT32 else kind)
