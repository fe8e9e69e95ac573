"""Tables as they come in use: other dtypes, columns in another order, cells missing, categories never seen."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd


def asked(table: Any) -> Iterator[tuple[str, Any]]:
    """Yield tables like the one of the fit, by what is odd about them."""
    if isinstance(table, pd.Series):
        yield "as fitted", table[:9]
        yield "one text", table[:1]
        yield "a list of texts", table[:5].tolist()
        yield "an array of objects", table[:5].to_numpy(object)
        yield "no texts", table[:0]
        yield "an empty text", pd.Series(["", "unseen words only"])
        return
    few = table[1:10]
    yield "as fitted", few
    yield "one row", table[3:4]
    yield "no rows", table[:0]
    yield "another index", few.set_axis([f"row {number}" for number in range(9)])
    yield "an index with repeats", few.set_axis([0] * 9)
    yield "columns in another order", few[few.columns[::-1]]
    yield "a column more", few.assign(extra=1.0)
    yield "a column more in front", pd.concat([pd.DataFrame({"extra": ["a"] * 9}), few.reset_index(drop=True)], axis=1)
    yield "a slice of every second row", table[1:18:2]
    yield "objects", few.astype(object)
    yield "nullable", few.convert_dtypes()
    yield "Arrow", few.convert_dtypes(dtype_backend="pyarrow")
    yield "whole numbers as floats", _changed(few, "iu", lambda column: column.astype(float))
    yield "whole numbers narrow", _changed(few, "iu", lambda column: column.astype("int16"))
    yield "floats narrow", _changed(few, "f", lambda column: column.astype("float32"))
    yield "booleans as whole numbers", _changed(few, "b", lambda column: column.astype(int))
    yield "booleans as floats", _changed(few, "b", lambda column: column.astype(float))
    yield "booleans as objects", _changed(few, "b", lambda column: column.astype(object))
    yield "texts as categories", _of_words(few, lambda column: column.astype("category"))
    yield "texts as pandas' strings", _of_words(few, lambda column: column.astype("string"))
    yield "categories as objects", _of_categories(few, lambda column: column.astype(object))
    yield (
        "categories in another order",
        _of_categories(few, lambda column: column.cat.set_categories(column.cat.categories[::-1])),
    )
    yield (
        "a category unseen",
        _of_categories(few, lambda column: pd.Series(["XL", *column[1:]], column.index, dtype="category")),
    )
    yield "a category unused", _of_categories(few, lambda column: column.cat.remove_unused_categories())
    yield "a word unseen", _of_words(few, lambda column: column.where(column.index != 2, "Atlantis"))
    yield "an empty word", _of_words(few, lambda column: column.where(column.index != 2, ""))
    for name in table.columns:
        yield f"without {name}", few.drop(columns=name)
        yield f"NaN in {name}", _missing(few, name, np.nan)
        yield f"None in {name}", _missing(few, name, None)
        yield f"NA in {name}", _missing(few, name, pd.NA)
    yield "all numbers missing", _changed(few, "f", lambda column: column * np.nan)
    yield "infinity", _changed(few, "f", lambda column: column.where(column.index != 5, np.inf))
    yield "numbers as texts", _changed(few, "iuf", lambda column: column.astype(str))
    yield "an array", few.to_numpy()
    if importlib.util.find_spec("polars"):
        yield "polars", importlib.import_module("polars").from_pandas(few)


def _changed(table: pd.DataFrame, kinds: str, change: Any) -> pd.DataFrame:
    plain = [name for name in table.columns if isinstance(table[name].dtype, np.dtype)]
    names = [name for name in plain if table[name].dtype.kind in kinds]
    return table.assign(**{name: change(table[name]) for name in names})


def _of_words(table: pd.DataFrame, change: Any) -> pd.DataFrame:
    texts = [name for name in table.columns if table[name].dtype == object or table[name].dtype == "string"]
    return table.assign(**{name: change(table[name]) for name in texts})


def _of_categories(table: pd.DataFrame, change: Any) -> pd.DataFrame:
    names = [name for name in table.columns if isinstance(table[name].dtype, pd.CategoricalDtype)]
    return table.assign(**{name: change(table[name]) for name in names})


def _missing(table: pd.DataFrame, name: str, cell: Any) -> pd.DataFrame:
    column = table[name].astype(object)
    column.iloc[4] = cell
    return table.assign(**{name: column})
