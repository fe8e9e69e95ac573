"""Refusals of a table before its numbers are looked at: names, shape, sparse and complex data.

The messages keep scikit-learn's words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from mlsys_core.errors import InvalidInputError

SHOWN = 5  # names that a message lists


# Text that spells numbers and None; neither; no columns of a frame; nor columns of Arrow's there.
Objects = Literal["any", "numbers", "arrays", "plain"]


@dataclass(frozen=True, slots=True)
class InputRules:
    """Tables that a source takes."""

    estimator: str = "the pipeline"  # what looks at the table first, for messages
    number_columns: tuple[int, ...] = ()  # that hold numbers as such: a function of numpy's fails on objects
    reads_by_name: bool = False  # columns are looked up by name: others may stand among them, in any order
    reads_as_given: bool = False  # a function of the user's own takes any frame, as it is
    selected_columns: tuple[int, ...] | None = None  # the others need not be there; None: all are read
    needs_names: bool = False  # columns were chosen by name, so an array is refused
    objects: Objects = "any"  # what may be among objects, beside numbers
    object_columns: tuple[int, ...] | None = None  # where this holds; None: in all
    takes_sparse: bool = False
    dense_answers: tuple[str, ...] = ()  # methods that take none all the same
    takes_sparse_nan: bool = False  # missing values in what is sparse
    category_columns: tuple[int, ...] | None = None  # of a frame that may be of pandas' category; None: all
    labels_are_names: bool = False  # a frame's labels that are no texts count as names, spelt as texts
    takes_tuples: bool = True  # rows in a tuple or another iterable that is no list, and scipy's sparse arrays
    passed_columns: tuple[int, ...] = ()  # go into a column transformer's array as they are: NA is refused there
    unstored_is_missing: bool = False  # what is not stored of a sparse table is missing, not 0


def check_labels(labels: Sequence[Any]) -> bool:
    """Look at a frame's columns by themselves.

    Returns:
        Whether they are names; scikit-learn takes a frame with other labels for an array.

    Raises:
        InvalidInputError: a column is there twice, or some labels alone are texts.
    """
    if len(set(labels)) < len(labels):
        twice = sorted({str(label) for label in labels if list(labels).count(label) > 1})
        raise InvalidInputError(f"Expected unique column names, got {_listed(twice)} more than once")
    are_text = [isinstance(label, str) for label in labels]
    if any(are_text) and not all(are_text):
        raise InvalidInputError(
            "Feature names are only supported if all input features have string names: make them all strings, as "
            "frame.columns.astype(str) does"
        )
    return all(are_text) and len(labels) > 0


def check_names(labels: Sequence[str], names: Sequence[str], rules: InputRules) -> None:
    """Look at a frame's columns beside those of the fit.

    Args:
        labels: The frame's.
        names: Those that the source was fitted on.
        rules: Rules of the source.

    Raises:
        InvalidInputError: the labels are not just the names in their order, unless columns are looked up by name.
    """
    if rules.reads_by_name or tuple(labels) == tuple(names):
        return
    unseen, missing = sorted(set(labels) - set(names)), sorted(set(names) - set(labels))
    parts = [
        f"Feature names unseen at fit time: {_listed(unseen)}" if unseen else "",
        f"Feature names seen at fit time, yet now missing: {_listed(missing)}" if missing else "",
        "" if unseen or missing else "Feature names must be in the same order as they were in fit",
    ]
    raise InvalidInputError(
        "The feature names should match those that were passed during fit. "
        f"{'. '.join(filter(None, parts))}. Pass the columns {_listed(list(names))} in this order"
    )


def check_width(shape: tuple[int, ...], width: int | None, rules: InputRules) -> None:
    """Look at a table's shape.

    Raises:
        InvalidInputError: it is not of two dimensions, or as wide as the source wants it.
    """
    if len(shape) == 2 and width in (None, shape[1]):
        return
    wanted = "any number of" if width is None else str(width)
    needed = f"a table of [rows, {wanted} columns] is needed"
    if len(shape) > 2:
        raise InvalidInputError(f"Found array with dim {len(shape)}, while dim <= 2 is required by X; {needed}")
    if len(shape) < 2:
        kind = "1D" if shape else "scalar"
        raise InvalidInputError(
            f"Expected 2D array, got {kind} array instead: the input has shape {shape} and {needed}. Reshape your "
            "data: one row is [[...]]"
        )
    if shape[1] == 0:
        raise InvalidInputError(
            f"Found array with 0 feature(s) (shape={shape}) while a minimum of 1 is required by X; {needed}"
        )
    raise InvalidInputError(
        f"X has {shape[1]} features, but {rules.estimator} is expecting {width} features as input: the input has shape "
        f"{shape}; {needed}"
    )


def check_kind(x: Any, rules: InputRules, names: Sequence[str] | None = None) -> None:
    """Look at what holds the numbers of an array, a frame or a sparse matrix.

    Args:
        x: The table.
        rules: Rules of the source.
        names: Those that it was fitted on, where ``x`` is read by them.

    Raises:
        InvalidInputError: complex numbers, a ``numpy.matrix``, or objects or sparse data that the source refuses.
    """
    if isinstance(x, np.matrix):
        raise InvalidInputError("np.matrix is not supported: convert it to an array with np.asarray")
    first = x[x.columns[0]] if is_frame(x) and len(x.columns) else x
    dtype = getattr(first, "dtype", None)
    if getattr(dtype, "kind", "") == "c":
        raise InvalidInputError(f"Complex data not supported: the input is of dtype {dtype}")
    if getattr(dtype, "kind", "") == "V":
        raise InvalidInputError(f"the input is of dtype {dtype}; a table of numbers is needed, not records")
    if type(dtype).__name__ == "SparseDtype":  # a frame of such columns alone is sparse to scikit-learn
        raise InvalidInputError(
            f"Sparse data was passed, as columns of dtype {dtype}, but dense data is required: use .sparse.to_dense()"
        )
    for index in rules.number_columns:
        column = x if not is_frame(x) else x[names[index]] if names and names[index] in x else x.iloc[:, index]
        if not hasattr(column.dtype, "kind") or column.dtype.kind not in "biuf":
            raise InvalidInputError(
                f"column {names[index] if names else index} is of dtype {column.dtype}, and a function that takes "
                "numbers alone reads it: convert it to float64"
            )
    if rules.category_columns is not None and is_frame(x):
        _check_categories(x, rules, names)
    if rules.passed_columns and is_frame(x):
        _check_passed(x, rules, names)
    looked_at = x
    if rules.object_columns is not None and names and is_frame(x):
        looked_at = x[[names[index] for index in rules.object_columns if names[index] in x]]
    if rules.objects != "any" and _has_objects(looked_at, rules.objects):
        raise InvalidInputError(
            f"{rules.estimator} takes columns of int, float or bool, not of objects or of Arrow: convert your "
            "data to numeric values, as x.astype(float) does"
        )
    if not is_sparse(x):
        return
    if not rules.takes_sparse:
        raise InvalidInputError(
            f"Sparse data was passed, but dense data is required by {rules.estimator}: pass X.toarray()"
        )
    if x.dtype.kind == "O":
        raise InvalidInputError("a sparse matrix of objects is not supported; make its numbers float64")
    if not rules.takes_sparse_nan and not np.isfinite(x.tocsr().data).all():
        raise InvalidInputError(
            f"Input X contains NaN or infinity, which {rules.estimator} does not accept in sparse data; pass "
            "X.toarray() where it may hold missing values"
        )


def _check_categories(x: Any, rules: InputRules, names: Sequence[str] | None) -> None:
    """Refuse columns of dtype category that were none in the fit."""
    fitted = {names[index] if names else x.columns[index] for index in rules.category_columns or ()}
    labels = [name for name in names if name in x] if names else list(x.columns)  # one that is missing is refused later
    new = [each for each in labels if each not in fitted and type(x[each].dtype).__name__ == "CategoricalDtype"]
    if new:
        raise InvalidInputError(
            f"{rules.estimator} was fitted on a frame whose columns {_listed(new)} were not of dtype category, and "
            "here are: its categorical features do not match; convert them as when fitting"
        )


def _check_passed(x: Any, rules: InputRules, names: Sequence[str] | None) -> None:
    """Refuse pandas' NA in nullable columns that a column transformer passes through."""
    for index in rules.passed_columns:
        name = names[index] if names else x.columns[index]
        column = x.get(name)
        if column is None:  # which is refused by its name later
            continue
        marker = getattr(column.dtype, "na_value", None)
        if type(marker).__name__ == "NAType" and bool(column.isna().any()):
            raise InvalidInputError(
                f"column {name!r} has dtype {column.dtype} and uses pandas.NA to represent null values, which the "
                "column transformer that passes it through refuses: convert it to float64, or to objects with NaN"
            )


def check_method(x: Any, method: str, rules: InputRules) -> None:
    """Look at sparse data for a method that takes none, though others of its source do.

    Raises:
        InvalidInputError: see above.
    """
    if method in rules.dense_answers and is_sparse(x):
        raise InvalidInputError(f"Sparse data was passed, but dense data is required by {method}: pass X.toarray()")


def check_container(x: Any, rules: InputRules) -> None:
    """Look at what holds rows that are in no array, frame or matrix, and at sparse arrays.

    Raises:
        InvalidInputError: the source takes lists and sparse matrices alone.
    """
    if rules.takes_tuples or isinstance(x, list | Mapping):
        return
    is_array = is_sparse(x) and type(x).__name__.endswith("_array")
    if is_array or not hasattr(x, "shape"):
        wanted = "a sparse matrix, as csr_matrix(X) makes" if is_array else "a list or an array"
        raise InvalidInputError(f"{rules.estimator} takes no {type(x).__name__}: pass {wanted}")


def no_rows(shape: Sequence[int]) -> InvalidInputError:
    """Return the refusal of a table without rows."""
    return InvalidInputError(
        f"Found array with 0 sample(s) (shape={tuple(shape)}) while a minimum of 1 is required by X: the input has no "
        "rows; at least one is needed"
    )


def is_frame(x: Any) -> bool:
    """Return whether a table whose columns have labels, as pandas' frames."""
    return hasattr(x, "columns") and not isinstance(x, Mapping)


def is_sparse(x: Any) -> bool:
    """Return whether a sparse matrix or array of scipy's."""
    return hasattr(x, "toarray") and hasattr(x, "nnz")


def _has_objects(x: Any, allowed: Objects) -> bool:
    """Return whether there are objects that are not allowed."""
    if allowed in ("arrays", "plain"):
        dtypes = [dtype for dtype in x.dtypes if type(dtype).__name__ != "CategoricalDtype"] if is_frame(x) else []
        is_arrow = allowed == "plain" and any(type(dtype).__name__ == "ArrowDtype" for dtype in dtypes)
        return is_arrow or any(dtype.kind == "O" or dtype == np.longdouble for dtype in dtypes)
    cells = np.asarray(x) if is_frame(x) else x
    return cells.dtype == object and any(cell is None or isinstance(cell, str) for cell in cells.flat)


def _listed(names: Sequence[Any]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{[str(name) for name in names[:SHOWN]]}{more}"
