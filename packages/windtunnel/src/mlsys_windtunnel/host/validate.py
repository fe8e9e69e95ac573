"""Validation of a raw table before anything is read of it: what holds it, its names, its shape.

The refusals keep scikit-learn's words; numbers are looked at where an operator's source does (``checks/values.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.checks.table import (
    InputRules,
    check_container,
    check_kind,
    check_labels,
    check_method,
    check_names,
    check_width,
    is_frame,
    is_sparse,
)
from mlsys_windtunnel.host.raw_table import (
    NamedTable,
    PlainTable,
    Table,
    array_of,
    has_names,
    is_polars,
    of_polars,
    stored_cells,
)

Columns = NamedTable | PlainTable  # a table that the source takes


@dataclass(frozen=True, slots=True)
class Schema:
    """Tables that a pipeline takes."""

    name: str  # input's name in messages
    names: tuple[str, ...] | None  # column names seen in fit
    width: int | None  # number of columns; None: any
    rules: InputRules
    takes_rows: bool  # one text, or another object, a row: only fallback operators read it
    takes_text: bool  # some column may hold text
    keeps_text: bool  # a fallback operator reads the raw input itself
    read: tuple[int, ...] | None  # indices of the columns that are read; None: all of ``names``


def validate(x: Table, schema: Schema, method: str | None = None) -> Columns:
    """Look at a table as the source would before it reads numbers; return its columns, ready to be read.

    Args:
        x: An array, a frame, a sparse matrix, rows in a list, or columns by their names.
        schema: What the pipeline takes.
        method: The answer that is asked for; some take no sparse data.

    Raises:
        InvalidInputError: the source refuses the table.
    """
    rules, names = schema.rules, schema.names
    if method is not None:
        check_method(x, method, rules)
    if schema.takes_rows and len(getattr(x, "shape", ((),))) == 1:
        return PlainTable(x)
    if not rules.takes_tuples:
        check_container(x, rules)
    if is_polars(x):
        x = of_polars(x)
    if rules.reads_as_given and is_frame(x):
        return PlainTable(x)
    if is_polars(x):
        if names is not None:
            check_names(x.columns, names, rules)
            return NamedTable(x, names, schema.read)
        check_width(tuple(x.shape), schema.width, rules)
        x = x.to_numpy()
    if rules.labels_are_names and is_frame(x) and not all(isinstance(label, str) for label in x.columns):
        x = x.set_axis([str(label) for label in x.columns], axis=1)
    if names is not None and has_names(x):
        if isinstance(x, Mapping):
            return NamedTable(x, names, schema.read)
        if check_labels(x.columns):
            check_names(x.columns, names, rules)
            check_kind(x, rules, names)
            return NamedTable(x, names, schema.read)
        if rules.reads_by_name:
            raise _needs_names(names)
    elif is_frame(x):
        check_labels(x.columns)
    elif not hasattr(x, "shape"):
        x = _array(x, schema)
    if names is not None and rules.needs_names:
        raise _needs_names(names)
    check_width(tuple(x.shape), schema.width, rules)
    check_kind(x, rules)
    return PlainTable(stored_cells(x) if rules.unstored_is_missing and is_sparse(x) else x)


def _needs_names(names: Sequence[str]) -> InvalidInputError:
    return InvalidInputError(
        "Specifying the columns using strings is only supported for dataframes: the source was fitted on the "
        f"columns {list(names)} by name, so give a DataFrame, or a mapping from these names to columns"
    )


def _array(rows: Any, schema: Schema) -> Any:
    """Read lists; texts among them are refused where no column may hold any, and kept for a fallback."""
    array = array_of(rows)
    if array.dtype != object or np.asarray(rows).dtype.kind not in "US":
        return array
    if schema.keeps_text:
        return np.asarray(rows)
    if not schema.takes_text:
        raise InvalidInputError(
            f"{schema.name}: text where numbers belong (dtype='numeric' is not compatible with arrays of "
            "bytes/strings): convert your data to numeric values"
        )
    return array
