"""Answer rows with the exported pipeline beside this file: a ``.pt2`` program of torch with the same name.

Needs torch and NumPy alone. Written by WindTunnel; ``PLAN`` says how raw columns become the program's table.

    from churn import load
    model = load()
    model.predict([{"age": 31.0, "city": "Oslo"}])

Rows are a DataFrame, a mapping from names to columns, a list of mappings, or an array. A missing cell is NaN, or None
where the pipeline had None. ``torch.export.load`` reads the program, so take both files from whom you trust.
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch

PLAN: dict[str, Any] = {}  # filled in when the file is written
ROWS_AT_ONCE = 4096
_SPACES = re.compile(r"\s\s+")


def load(path: Path | str | None = None) -> Model:
    """Load the program: by default the one beside this file, with its name and ``.pt2``."""
    program = torch.export.load(str(path or Path(__file__).with_suffix(".pt2")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Model(program.module(), PLAN)


class Model:
    """A pipeline: raw rows in, answers as the source gives them. Its methods are those that the file holds."""

    def __init__(self, program: Callable[[Any], Any], plan: Mapping[str, Any]) -> None:
        self.plan = plan
        self._program = program

    @property
    def classes_(self) -> Any:
        """The labels of a classifier, in the order of its probabilities."""
        return np.array(self.plan["classes"])

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        if name in vars(self)["plan"]["answers"]:
            return lambda rows: self.answer(name, rows)
        raise AttributeError(f"this file has no {name}; it holds {', '.join(vars(self)['plan']['answers'])}")

    def answer(self, method: str, rows: Any) -> Any:
        """Return the answer of a method of the source.

        Raises:
            ValueError: the source refuses the rows.
        """
        plan = self.plan
        table = encode(plan, rows)
        parts = [self._run(table[start : start + ROWS_AT_ONCE]) for start in range(0, len(table), ROWS_AT_ONCE)]
        index = plan["answers"].index(method)
        result = np.concatenate([part[index] for part in parts])
        outputs = plan["outputs"]
        if outputs and method == "predict":
            return np.stack([np.array(labels)[result[:, each]] for each, labels in enumerate(outputs)], axis=1)
        if outputs and method in ("predict_proba", "predict_log_proba"):
            return np.split(result, np.cumsum([len(labels) for labels in outputs])[:-1], axis=1)
        if method in plan["flat"]:
            result = result[:, 0]
        return self.classes_[result] if method == "predict" and plan["classes"] else result

    def _run(self, table: Any) -> list[Any]:
        plan = self.plan
        with torch.inference_mode():
            answers = [each.numpy() for each in self._program(torch.from_numpy(np.ascontiguousarray(table)))]
        start = len(plan["answers"]) + plan["tells_ties"]
        for message, flag in zip(plan["refusals"], answers[start:], strict=True):
            if flag:
                raise ValueError(message)
        if plan["tells_ties"] and answers[start - 1].any():
            rows = np.flatnonzero(answers[start - 1]).tolist()
            raise ValueError(f"rows {rows[:5]} are equally near to several points, and only the source can decide")
        return answers


def encode(plan: Mapping[str, Any], rows: Any) -> Any:
    """Return the packed table ``[rows, width]`` of raw rows.

    Raises:
        ValueError: columns are missing, or hold what the source refuses.
    """
    columns = _columns(plan, rows)
    if not len(columns[0]):
        raise ValueError("the input has no rows; at least one is needed")
    tables = [_MAKERS[part["kind"]](part, plan, columns) for part in plan["tables"]]
    table = np.concatenate(tables, axis=1, dtype=np.float64)
    if plan["dtype"] == "float64":
        return table
    with np.errstate(over="ignore"):
        narrow = table.astype(plan["dtype"])
    if (np.isinf(narrow) & np.isfinite(table)).any():
        raise ValueError(f"Input X contains a value too large for dtype({plan['dtype']!r})")
    return narrow


def _columns(plan: Mapping[str, Any], rows: Any) -> list[Any]:
    """Return the columns that the plan reads, as arrays ``[rows]``."""
    names = [column["name"] for column in plan["columns"]]
    if hasattr(rows, "toarray"):
        raise ValueError("sparse data was passed; give a dense array or columns")
    if isinstance(rows, Sequence) and rows and all(isinstance(row, Mapping) for row in rows):
        missing = sorted({name for row in rows for name in names if name not in row})
        if missing:
            raise ValueError(f"rows lack the columns {missing}; give each row all of {names}")
        rows = {name: [row[name] for row in rows] for name in names}
    if isinstance(rows, Mapping) or hasattr(rows, "columns"):
        found = _named(plan, rows, names)
    else:
        if plan["needs_names"]:
            raise ValueError(f"columns are read by name: give a DataFrame, or a mapping with {names}")
        array = _array(rows)
        if array.ndim != 2 or array.shape[1] != plan["width"]:
            raise ValueError(f"the input has shape {array.shape}; [rows, {plan['width']} columns] are needed")
        found = [array[:, index] for index in plan["indices"]]
    sizes = {len(column) for column in found}
    if len(sizes) > 1:
        raise ValueError(f"the columns have {sorted(sizes)} rows; each needs a cell for each row")
    return found


def _named(plan: Mapping[str, Any], rows: Any, names: Sequence[str]) -> list[Any]:
    labels = list(rows) if isinstance(rows, Mapping) else list(rows.columns)
    if not plan["is_named"] and not isinstance(rows, Mapping):
        if len(labels) != plan["width"]:
            raise ValueError(f"the input has {len(labels)} columns; {plan['width']} are needed")
        return [_cells(rows[labels[index]]) for index in plan["indices"]]
    missing = [name for name in names if name not in labels]
    if missing:
        raise ValueError(f"the input lacks the columns {missing}; {names} are read")
    if not isinstance(rows, Mapping) and not plan["reads_by_name"] and labels != plan["names"]:
        raise ValueError(f"the feature names should be those of the fit, in their order: {plan['names']}")
    if not isinstance(rows, Mapping) and plan["category_columns"] is not None:
        new = [name for name in labels if type(rows[name].dtype).__name__ == "CategoricalDtype"]
        new = [name for name in new if name not in plan["category_columns"]]
        if new:
            raise ValueError(f"the columns {new} are of dtype category, and were not in the fit")
    return [_cells(rows[name]) for name in names]


def _cells(column: Any) -> Any:
    dtype = getattr(column, "dtype", None)
    is_nullable = hasattr(column, "isna") and not isinstance(dtype, np.dtype) and getattr(dtype, "kind", "O") in "iufb"
    if is_nullable and column.isna().any():  # in a nullable column of numbers NA is NaN
        return column.to_numpy(dtype=np.float64, na_value=math.nan)
    array = column.to_numpy() if hasattr(column, "to_numpy") and not hasattr(column, "iloc") else _array(column)
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def _array(rows: Any) -> Any:
    array = np.asarray(rows)
    if array.dtype.kind in "US" and not isinstance(rows, np.ndarray):
        array = np.asarray(rows, dtype=object)  # ["a", 1] stays two objects
    return array


def is_missing(cell: object) -> bool:
    """Return whether a cell is NaN or pandas' NA; None is a category like any other."""
    if isinstance(cell, float | np.floating):
        return bool(cell != cell)
    return type(cell).__name__ in ("NAType", "NaTType")


def _numbers(column: Any, name: str) -> Any:
    if column.dtype.kind in "cMmSUV":
        raise ValueError(f"column {name} is of dtype {column.dtype}; numbers are needed")
    try:
        if column.dtype == object:
            column = np.array([math.nan if is_missing(cell) else cell for cell in column.tolist()], object)
        return column.astype(np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"column {name}: text where numbers belong ({error})") from error


def _table_of_numbers(part: Mapping[str, Any], plan: Mapping[str, Any], columns: Sequence[Any]) -> Any:
    names = [plan["columns"][index]["name"] for index in part["columns"]]
    made = [_numbers(columns[index], name) for index, name in zip(part["columns"], names, strict=True)]
    return np.stack(made, axis=1)


def _table_of_codes(part: Mapping[str, Any], plan: Mapping[str, Any], columns: Sequence[Any]) -> Any:
    made = []
    for each in part["columns"]:
        index = each if isinstance(each, int) else each["cells"]["column"]
        name = plan["columns"][index]["name"]
        made.append(_numbers(columns[index], name) if isinstance(each, int) else _codes(each, columns[index], name))
    return np.stack(made, axis=1)


def _codes(code: Mapping[str, Any], column: Any, name: str) -> Any:
    known = dict(zip(code["categories"], code["codes"], strict=True))
    unknown, fills = code["unknown"], code["cells"]["fills"]
    is_of_numbers = bool(known) and all(type(each) in (int, float) for each in known)
    if is_of_numbers and column.dtype.kind not in "iufO":
        raise ValueError(f"column {name} is of dtype {column.dtype}, and the encoder was fitted on numbers")
    is_lookup = unknown == unknown and not fills  # not of trees, and not behind an imputer
    if is_lookup and column.dtype.kind in "iuf" and not all(type(each) in (int, float, bool) for each in known):
        raise ValueError(f"column {name} is of dtype {column.dtype}, and the encoder was fitted on texts or objects")
    made = np.empty(len(column))
    for row, raw in enumerate(column.tolist()):
        cell = raw
        for fill in fills:
            cell = _filled(cell, fill, name)
        try:
            is_gap = isinstance(cell, float | np.floating) and cell != cell  # pandas' NA is no category
            found = code["missing"] if is_gap else known.get(cell)
        except TypeError as error:
            raise ValueError(f"column {name}: a cell is no category ({error})") from error
        made[row] = _unknown(code, cell, name) if found is None else found
    return made if unknown == unknown else np.where(made == -1, math.nan, made)


def _filled(cell: Any, fill: Mapping[str, Any], name: str) -> Any:
    is_gap = is_missing(cell)
    if is_missing(fill["marker"]):
        return fill["value"] if is_gap or (fill["takes_all_missing"] and cell is None) else cell
    if is_gap:
        raise ValueError(f"column {name} contains NaN, where {fill['marker']!r} stands for what is missing")
    return fill["value"] if cell == fill["marker"] else cell


def _unknown(code: Mapping[str, Any], cell: Any, name: str) -> float:
    if code["unknown"] != code["unknown"]:
        if code["refuses"] and cell is not None and not is_missing(cell):
            raise ValueError(f"Found a category not in the training set for column {name}: {cell!r}")
        return -1.0
    if isinstance(cell, date | np.datetime64) or (isinstance(cell, float) and math.isinf(cell)):
        raise ValueError(f"column {name} holds {cell!r}, which is no category")
    if code["refuses"]:
        raise ValueError(f"column {name} has categories that the encoder was not fitted on: {cell!r}")
    return float(code["unknown"] + (bucket(cell, code["buckets"]) if code["buckets"] else 0))


def bucket(category: Any, num_buckets: int) -> int:
    """Return the bucket of a category, equal in every process and for equal categories."""
    is_whole = isinstance(category, Integral | np.bool_) or (
        isinstance(category, Real) and float(category).is_integer()
    )
    text = "nan" if is_missing(category) else str(int(category) if is_whole else category)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) % num_buckets


def _table_of_flags(part: Mapping[str, Any], plan: Mapping[str, Any], columns: Sequence[Any]) -> Any:
    made, marker = [], part["marker"]
    for position, index in enumerate(part["columns"]):
        column, name = columns[index], plan["columns"][index]["name"]
        if column.dtype.kind not in "fiuO":
            raise ValueError(f"column {name} is of dtype {column.dtype}; numbers or objects are needed")
        gaps = np.array([is_missing(cell) for cell in column.tolist()], bool)
        if column.dtype.kind == "f" and np.isinf(column).any():
            raise ValueError(f"column {name} contains infinity")
        if not is_missing(marker) and gaps.any():
            raise ValueError(f"column {name} contains NaN, where {marker!r} stands for what is missing")
        flags = gaps if is_missing(marker) else np.array([cell == marker for cell in column.tolist()], bool)
        if position in part["flagged"]:
            made.append(flags)
        elif part["refuses_new"] and flags.any():
            raise ValueError(f"column {name} has missing values and had none in the fit")
    order = [sorted(part["flagged"]).index(each) for each in part["flagged"]]
    if not order:
        return np.zeros((len(columns[0]), 0))
    return np.stack([made[each] for each in order], axis=1).astype(np.float64)


def _words_of_column(part: Mapping[str, Any], plan: Mapping[str, Any], columns: Sequence[Any]) -> Any:
    return table_of_words(part, plan["columns"][part["column"]]["name"], columns[part["column"]].tolist())


def table_of_words(part: Mapping[str, Any], name: str, texts: Sequence[Any]) -> Any:
    """Return counts of terms ``[rows, terms]``, weighted and normalised as the plan's part says.

    Raises:
        ValueError: a cell is no text.
    """
    vocabulary = part["vocabulary"]
    table = np.zeros((len(texts), len(vocabulary)))
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"column {name} holds {text!r}, which is no text")
        for term in terms(part, text):
            if term in vocabulary:
                table[row, vocabulary[term]] += 1
    if part["is_binary"]:
        table = np.minimum(table, 1)
    if part["sublinear"]:
        table = np.where(table > 0, np.log(np.where(table > 0, table, 1)) + 1, 0)
    if part["idf"] is not None:
        table = table * np.array(part["idf"])
    if part["norm"] is not None:
        size = np.abs(table).sum(axis=1) if part["norm"] == "l1" else np.sqrt((table * table).sum(axis=1))
        table = table / np.where(size == 0, 1, size)[:, None]
    return table


def terms(part: Mapping[str, Any], text: str) -> list[str]:
    """Return the n-grams of a text, one after another, as scikit-learn's analyzers do."""
    if part["lowercase"]:
        text = text.lower()
    if part["strip_accents"] and not text.isascii():
        apart = unicodedata.normalize("NFKD", text)
        is_ascii = part["strip_accents"] == "ascii"
        text = "".join(each for each in apart if (each.isascii() if is_ascii else not unicodedata.combining(each)))
    low, high = part["ngrams"]
    if part["analyzer"] == "word":
        tokens = [each for each in re.findall(part["pattern"], text) if each not in part["stop_words"]]
        return [
            " ".join(tokens[start : start + size])
            for size in range(low, min(high, len(tokens)) + 1)
            for start in range(len(tokens) - size + 1)
        ]
    text = _SPACES.sub(" ", text)
    if part["analyzer"] == "char":
        sizes = range(low, min(high, len(text)) + 1)
        return [text[start : start + size] for size in sizes for start in range(len(text) - size + 1)]
    found = []
    for word in text.split():
        padded = f" {word} "
        for size in range(low, high + 1):
            found += [padded[start : start + size] for start in range(max(1, len(padded) - size + 1))]
            if size >= len(padded):  # a short word counts once
                break
    return found


_MAKERS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any], Sequence[Any]], Any]] = {
    "numbers": _table_of_numbers,
    "codes": _table_of_codes,
    "flags": _table_of_flags,
    "words": _words_of_column,
}
