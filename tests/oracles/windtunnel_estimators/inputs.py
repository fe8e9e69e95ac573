"""Inputs that a user may hand to ``predict``, made of rows that a source was fitted on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse

Case = tuple[str, Any]
SPARSE = ("csr_matrix", "csc_matrix", "coo_matrix", "csr_array", "dok_matrix", "lil_matrix")
DTYPES = ("float32", "float16", "longdouble", "int64", "int32", "int8", "uint8", "uint64", "bool")
EXTREMES = (1e-300, 1e6, 1e30, 1e39, 1e155, 1e300, -1e30, -1e39)


def of_numbers(x: np.ndarray, names: list[str] | None, rng: np.random.Generator) -> Iterator[Case]:
    """Cases for a source that was fitted on numbers ``[rows, columns]``, with these column names or none."""
    yield from _values(x, rng)
    yield from _dtypes(x)
    yield from _containers(x)
    yield from _shapes(x)
    yield from _no_numbers(x)
    yield from _frames(x, names or [f"f{index}" for index in range(x.shape[1])])


def of_frame(frame: pd.DataFrame, rng: np.random.Generator) -> Iterator[Case]:
    """Cases for a source that was fitted on a frame whose columns may hold text."""
    names = list(frame.columns)
    yield "as fitted", frame
    yield "one row", frame[:1]
    yield "rows in another order", frame.sample(frac=1.0, random_state=int(rng.integers(1000)))
    yield "columns in another order", frame[names[::-1]]
    yield "a column more", frame.assign(another=1.0)
    for name in names:
        yield f"without {name}", frame.drop(columns=[name])
        for label, cell in (("NaN", np.nan), ("None", None), ("inf", np.inf), ("text", "new"), ("number", -3)):
            changed = frame.astype({name: object})
            changed.iloc[0, names.index(name)] = cell
            yield f"{label} in {name}", changed
            yield f"{label} in {name}, inferred", changed.infer_objects()
        yield f"{name} as category", frame.astype({name: "category"})
        yield f"{name} as object", frame.astype({name: object})
        yield f"{name} as text", frame.astype({name: str})
    yield "two columns of one name", frame.set_axis([names[0]] * len(names), axis=1)
    yield "numbers for names", frame.set_axis(range(len(names)), axis=1)
    yield "an array", frame.to_numpy()
    yield "lists", frame.to_numpy().tolist()
    yield "no rows", frame[:0]
    yield "one column", frame[names[0]]
    yield "no columns", frame[[]]


def _values(x: np.ndarray, rng: np.random.Generator) -> Iterator[Case]:
    yield "as fitted", x
    yield "one row", x[:1]
    yield "random", rng.normal(size=x.shape) * (x.std(axis=0) + 1) + x.mean(axis=0)
    yield "zeros", np.zeros_like(x)
    yield "negative", -np.abs(x) - 1
    for scale in EXTREMES:
        yield f"one cell {scale:g}", _with(x, (1, -1), scale)
    yield "cells of 1e30", np.full_like(x, 1e30)
    yield "cells of 1e200", np.full_like(x, 1e200)
    for label, cell in (("NaN", np.nan), ("inf", np.inf), ("-inf", -np.inf)):
        yield f"{label} in the first cell", _with(x, (0, 0), cell)
        yield f"{label} in the last cell", _with(x, (-1, -1), cell)
        yield f"{label} alone", _with(x, (0, 0), cell)[:1]
    yield "all NaN", np.full_like(x, np.nan)
    yield "NaN and inf", _with(_with(x, (0, 0), np.nan), (1, -1), np.inf)


def _dtypes(x: np.ndarray) -> Iterator[Case]:
    for name in DTYPES:
        kind = np.dtype(name).kind
        info = None if kind in "bf" else np.iinfo(name)
        whole = x if info is None else np.clip(np.trunc(x), max(info.min, -1e18), min(info.max, 1e18))
        yield name, whole.astype(name)
    yield "NaN in float32", _with(x, (0, 0), np.nan).astype(np.float32)
    yield "inf in float32", _with(x, (0, 0), np.inf).astype(np.float32)
    yield "objects", x.astype(object)
    yield "objects with None", _with(x.astype(object), (0, 0), None)
    yield "objects with NA", _with(x.astype(object), (0, 0), pd.NA)
    yield "objects with NaN", _with(x.astype(object), (0, 0), np.nan)
    yield "objects with inf", _with(x.astype(object), (0, 0), np.inf)
    yield "objects with a long integer", _with(x.astype(object), (0, 0), 10**400)
    yield "objects with decimals", _with(x.astype(object), (0, 0), Decimal("1.5"))
    yield "objects with fractions", _with(x.astype(object), (0, 0), Fraction(1, 3))
    yield "objects with True", _with(x.astype(object), (0, 0), True)


def _containers(x: np.ndarray) -> Iterator[Case]:
    yield "lists", x.tolist()
    yield "tuples", tuple(map(tuple, x.tolist()))
    yield "a list of arrays", list(x)
    yield "lists with None", [[None, *row[1:]] for row in x.tolist()]
    yield "Fortran order", np.asfortranarray(x)
    yield "strided", np.repeat(x, 2, axis=1)[:, ::2]
    yield "reversed", x[::-1]
    yield "big-endian", x.astype(">f8")
    yield "unaligned", _unaligned(x)
    read_only = x.copy()
    read_only.flags.writeable = False
    yield "read-only", read_only
    yield "masked", np.ma.masked_array(x, mask=np.zeros(x.shape, bool))
    yield "masked with a cell hidden", np.ma.masked_array(x, mask=_with(np.zeros(x.shape, bool), (0, 0), True))
    yield "matrix", np.matrix(x)
    for name in SPARSE:
        yield name, getattr(scipy.sparse, name)(x)
    yield "sparse with NaN", scipy.sparse.csr_matrix(_with(x, (0, 0), np.nan))
    yield "sparse with inf", scipy.sparse.csr_matrix(_with(x, (0, 0), np.inf))
    yield "sparse float32", scipy.sparse.csr_matrix(x.astype(np.float32))


def _shapes(x: np.ndarray) -> Iterator[Case]:
    yield "a column less", x[:, :-1]
    yield "a column more", np.hstack([x, x[:, :1]])
    yield "one column", x[:, :1]
    yield "no columns", x[:, :0]
    yield "no rows", x[:0]
    yield "an empty list", []
    yield "a list of an empty list", [[]]
    yield "one dimension", x[0]
    yield "one dimension as list", x[0].tolist()
    yield "three dimensions", x[None]
    yield "rows of unlike lengths", [[1.0], [1.0, 2.0]]
    yield "a number", 5
    yield "None", None
    yield "text", "text"
    yield "dictionary", {"a": [1, 2]}
    yield "generator", (row for row in x.tolist())
    yield "object", object()


def _no_numbers(x: np.ndarray) -> Iterator[Case]:
    yield "texts of numbers", x.astype(str)
    yield "objects of texts of numbers", x.astype(str).astype(object)
    yield "lists of texts of numbers", x.astype(str).tolist()
    yield "texts", np.full(x.shape, "a")
    yield "objects with a text", _with(x.astype(object), (0, 0), "a")
    yield "lists with a text", [["a", *row[1:]] for row in x.tolist()]
    yield "bytes", np.full(x.shape, b"1")
    yield "dates", np.full(x.shape, np.datetime64("2024-01-01"))
    yield "times", np.full(x.shape, np.timedelta64(1, "s"))
    yield "objects with a date", _with(x.astype(object), (0, 0), np.datetime64("2024-01-01"))
    yield "objects with a timestamp", _with(x.astype(object), (0, 0), pd.Timestamp("2024-01-01"))
    yield "complex", x.astype(complex)
    yield "complex with an imaginary part", x + 1j
    yield "objects with a complex number", _with(x.astype(object), (0, 0), 1j)
    yield "objects with a list", _with_list(x)
    yield "objects with a dictionary", _with(x.astype(object), (0, 0), {"a": 1})
    yield "records", np.zeros(x.shape, [("a", float)])


def _frames(x: np.ndarray, names: list[str]) -> Iterator[Case]:
    frame = pd.DataFrame(x, columns=names)
    yield "frame", frame
    yield "frame of one row", frame[:1]
    yield "frame with another index", frame.set_axis(range(100, 100 + len(frame)))
    yield "frame, columns in another order", frame[names[::-1]]
    yield "frame, a column more", frame.assign(another=1.0)
    yield "frame, a column less", frame[names[:-1]]
    yield "frame, one name changed", frame.rename(columns={names[-1]: "another"})
    yield "frame, one name twice", frame.set_axis([names[0]] * len(names), axis=1)
    yield "frame, numbers for names", frame.set_axis(range(len(names)), axis=1)
    yield "frame, names of two kinds", frame.set_axis([1, *names[1:]], axis=1)
    yield "frame of float32", frame.astype(np.float32)
    yield "frame of nullable numbers", frame.astype("Float64")
    yield "frame with NA", frame.astype("Float64").mask(_with(np.zeros(x.shape, bool), (0, 0), True), pd.NA)
    yield "frame with NaN", pd.DataFrame(_with(x, (0, 0), np.nan), columns=names)
    yield "frame with inf", pd.DataFrame(_with(x, (0, 0), np.inf), columns=names)
    yield "frame of objects", frame.astype(object)
    yield "frame of texts", frame.astype(str)
    yield "frame with a text", frame.astype(object).mask(_with(np.zeros(x.shape, bool), (0, 0), True), "a")
    yield "frame with a date", frame.assign(**{names[0]: pd.Timestamp("2024-01-01")})
    yield "frame of categories", frame.astype("category")
    yield "frame of sparse columns", frame.astype(pd.SparseDtype(float))
    yield "frame with levels of columns", frame.set_axis(pd.MultiIndex.from_product([["a"], names]), axis=1)
    yield "frame without rows", frame[:0]
    yield "frame without columns", frame[[]]
    yield "series", frame[names[0]]
    yield "row of a frame", frame.iloc[0]
    yield "index", frame.index


def _with(x: np.ndarray, index: tuple[int, int], cell: Any) -> np.ndarray:
    changed = x.copy()
    changed[index] = cell
    return changed


def _with_list(x: np.ndarray) -> np.ndarray:
    changed = x.astype(object)
    changed[0, 0] = [1, 2]
    return changed


def _unaligned(x: np.ndarray) -> np.ndarray:
    raw = np.zeros(x.nbytes + 1, np.uint8)
    view = raw[1:].view(x.dtype).reshape(x.shape)
    view[:] = x
    return view


Cases = Callable[[np.random.Generator], Iterator[Case]]
