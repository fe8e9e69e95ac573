"""Parts of an exported pipeline on the host: plain data, of which ONNX nodes are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from mlsys_core.errors import InvalidInputError

from mlsys_windtunnel.host.lookup import is_missing

ColumnType = Literal["string", "double", "float", "int64", "bool"]
Category = str | int | float | bool | None
MISSING_TEXTS: dict[str, Any] = {"nan": np.nan, "None": None}  # as programs without objects are given them


@dataclass(frozen=True, slots=True)
class Column:
    """A raw column of the pipeline's input."""

    name: str
    type: ColumnType


@dataclass(frozen=True, slots=True)
class Fill:
    """A missing value and what a source's imputer puts in its place."""

    marker: Category  # NaN stands for each missing number
    value: Category
    takes_all_missing: bool = False  # None and pandas' NA are filled as well


@dataclass(frozen=True, slots=True)
class Cells:
    """A raw column's cells, as the imputers before a look-up leave them."""

    column: int  # index in the plan's columns
    fills: tuple[Fill, ...] = ()


@dataclass(frozen=True, slots=True)
class Numbers:
    """Columns of numbers as they are."""

    columns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Code:
    """Categories of a column, and the code of each."""

    cells: Cells
    categories: tuple[Category, ...]  # without the missing ones
    codes: tuple[int, ...]
    missing: int | None  # code of a missing cell; None: as an unknown one
    unknown: float  # code of any other cell; NaN where the trees want that
    refuses: bool = False  # an unknown cell is refused


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes of several columns side by side; a plain number among them is a column as it is."""

    columns: tuple[Code | int, ...]


@dataclass(frozen=True, slots=True)
class Flags:
    """Flags of missing cells."""

    columns: tuple[int, ...]
    flagged: tuple[int, ...]  # indices in ``columns``
    marker: Category
    refuses_new: bool


Part = Numbers | Codes | Flags


@dataclass(frozen=True)
class HostPlan:
    """Raw columns to the frontier's tables."""

    columns: tuple[Column, ...]  # those that are read
    is_named: bool  # the source was fitted on names; else the columns are x0, x1, ... by their places
    indices: tuple[int, ...]  # places of the columns in the source's input
    width: int  # columns of the source's input
    tables: tuple[Part, ...]  # one for each value of the frontier
    frontier: tuple[str, ...] = field(default=())


def code_of(code: Code, cell: Any) -> float:
    """Return the code of a cell: a category, text, None or NaN.

    Example:
        >>> red = Code(Cells(0, (Fill(float("nan"), "red"),)), ("blue", "red"), (0, 1), None, 2)
        >>> [code_of(red, cell) for cell in ("blue", float("nan"), "green", None)]
        [0, 1, 2, 2]
    """
    for fill in code.cells.fills:
        is_filled = is_missing(cell) if is_missing(fill.marker) else cell == fill.marker
        if is_filled or (fill.takes_all_missing and cell is None):
            cell = fill.value
    if is_missing(cell):
        return code.unknown if code.missing is None else code.missing
    return dict(zip(code.categories, code.codes, strict=True)).get(cell, code.unknown)


def keys_of(code: Code, column: Column) -> dict[Any, float]:
    """Return the code of each known value of a typed column, gaps among them; of texts as ``MISSING_TEXTS`` says.

    Raises:
        InvalidInputError: a text stands for a category and for missing cells, and these have different codes.
    """
    markers = [fill.marker for fill in code.cells.fills]
    values: list[Any] = [each for each in (*code.categories, *markers) if each is not None and not is_missing(each)]
    if column.type != "string":
        is_real = column.type in ("double", "float")
        numbers: dict[Any, float] = {float(each) if is_real else int(each): code_of(code, each) for each in values}
        gap = code_of(code, np.nan)
        return numbers | ({np.nan: gap} if is_real and not _is_same(gap, code.unknown) else {})
    keys: dict[Any, float] = {each: code_of(code, each) for each in values}
    for text, value in MISSING_TEXTS.items():
        of_gap = code_of(code, value)
        if _is_same(of_gap, code.unknown) or _is_same(keys.get(text, of_gap), of_gap):
            continue
        raise cannot(
            f"the column {column.name!r}, where {text!r} is a category and missing cells have a code of their own; "
            "rename that category"
        )
    gaps = {text: code_of(code, value) for text, value in MISSING_TEXTS.items()}
    return {text: gap for text, gap in gaps.items() if not _is_same(gap, code.unknown)} | keys


def _is_same(one: float, other: float) -> bool:
    return one == other or (one != one and other != other)


def cannot(what: str) -> InvalidInputError:
    """Return the refusal of a part that no file with named columns holds."""
    return InvalidInputError(
        f"a file that takes named columns cannot hold {what}; export with columns=False (--packed) and encode() rows"
    )
