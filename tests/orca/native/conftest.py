"""One native operator at a time, compiled for each level that this machine executes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from mlsys_core.native import Struct
from mlsys_core.native.loader import builds_to_test
from mlsys_orca.backends.native import library
from torch import Tensor

BUILDS = builds_to_test()


@dataclass
class Ragged:
    """A batch for attention: per request (tokens kept before, new rows), its cache and rotary factors."""

    spans: list[tuple[int, int]]
    tables: list[list[int]]
    keys: Tensor
    values: Tensor
    cos: Tensor | None = None
    sin: Tensor | None = None
    cache: str = "floats"  # kv_layout.h: CacheKind


def run_operator(
    native: Any,
    operator: Struct,
    states: Tensor,
    width: int,
    *,
    threads: int,
    ragged: Ragged | None = None,
    largest: np.ndarray[Any, Any] | None = None,
) -> Tensor:
    """Run one operator from register 0, ``states`` [rows, n], to register 1, [rows, width]; fills ``largest``."""
    widths = (ctypes.c_int32 * 2)(states.shape[1], width)
    program = ctypes.c_void_p(native.orca_program(threads, 100, 2, widths))
    getattr(native, f"orca_add_{type(operator).__name__.lower()}")(program, ctypes.byref(operator))
    out = torch.zeros(len(states), width)
    batch = native.structs["Batch"]()  # all zeros
    batch.num_rows, batch.states, batch.logits = len(states), states.data_ptr(), out.data_ptr()
    batch.logits_stride = width
    held: list[Any] = []
    if largest is not None:
        sampled = np.arange(len(states), dtype=np.int32)
        batch.num_sampled, batch.sampled, batch.largest = len(states), sampled.ctypes.data, largest.ctypes.data
        held.append(sampled)
    if ragged is not None:
        rows, start, at = [], 0, 0
        for (past, new), table in zip(ragged.spans, ragged.tables, strict=True):
            rows.append((start, start + new, past + new, at, 0))  # no states
            start, at = start + new, at + len(table)
        spans = np.array(rows, dtype=np.int32)
        tables = np.array([block for table in ragged.tables for block in table], dtype=np.int32)
        batch.num_spans, batch.spans, batch.block_tables = len(rows), spans.ctypes.data, tables.ctypes.data
        batch.keys, batch.values = ragged.keys.data_ptr(), ragged.values.data_ptr()
        batch.num_layers, batch.cache = 1, native.enums["CacheKind"][ragged.cache]
        held += [spans, tables]
        for name in ("cos", "sin"):
            if (factor := getattr(ragged, name)) is not None:
                pointer = (ctypes.c_void_p * 1)(factor.data_ptr())
                held.append(pointer)
                setattr(batch, name, ctypes.addressof(pointer))
    native.orca_run(program, ctypes.byref(batch))
    native.orca_free(program)
    return out


@pytest.fixture(params=BUILDS)
def native(request: pytest.FixtureRequest) -> Any:
    """The library in one of its builds."""
    return library.load(BUILDS[request.param])


@pytest.fixture
def run() -> Callable[..., Tensor]:
    """:func:`run_operator`."""
    return run_operator


@pytest.fixture
def ragged() -> type[Ragged]:
    """:class:`Ragged`."""
    return Ragged
