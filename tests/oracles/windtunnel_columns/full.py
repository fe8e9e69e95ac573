"""Encoders fitted on a column of every kind, asked about columns of every kind: translations beside their sources."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from mlsys_core.errors import MlsysError
from mlsys_windtunnel import translate
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, TargetEncoder

from tests.oracles.tally import Tally
from tests.oracles.windtunnel_estimators.compare import compare

Case = tuple[str, str]  # an encoder, and the column that it is fitted on
ROWS = 90
DTYPES = {
    "texts": ["object", "str", "string", "category", "string[pyarrow]"],
    "truths": ["bool", "object", "boolean", "category", "int64", "float64", "str"],
    "numbers": ["int64", "float64", "object", "Int64", "category", "str", "float32", "int8"],
}
CELLS: dict[str, list[Any]] = {"texts": ["yes", "no", "maybe"], "truths": [True, False], "numbers": [1, 2, 3]}
GAPS: dict[str, Any] = {"whole": 0, "NaN": np.nan, "None": None, "NA": pd.NA}

ENCODERS: dict[str, Callable[[], Any]] = {
    "one-hot": lambda: OneHotEncoder(handle_unknown="ignore"),
    "one-hot, refuses": OneHotEncoder,
    "one-hot, rare": lambda: OneHotEncoder(handle_unknown="infrequent_if_exist", max_categories=2),
    "ordinals": lambda: OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1),
    "ordinals, gap": lambda: OrdinalEncoder(
        handle_unknown="use_encoded_value", unknown_value=-1, encoded_missing_value=-2
    ),
    "means": lambda: TargetEncoder(random_state=0),
    "filled, one-hot": lambda: make_pipeline(
        SimpleImputer(strategy="most_frequent"), OneHotEncoder(handle_unknown="ignore")
    ),
    "filled, ordinals": lambda: make_pipeline(
        SimpleImputer(strategy="constant", fill_value="none"),
        OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1),
    ),
    "filled in frames": lambda: make_pipeline(
        SimpleImputer(strategy="most_frequent"), OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    ).set_output(transform="pandas"),
    "filled, flagged": lambda: make_pipeline(
        SimpleImputer(strategy="most_frequent", add_indicator=True), OneHotEncoder(handle_unknown="ignore")
    ),
    "None filled": lambda: make_pipeline(
        SimpleImputer(missing_values=None, strategy="constant", fill_value="none"),
        OneHotEncoder(handle_unknown="ignore"),
    ),
    "first dropped": lambda: OneHotEncoder(drop="first", handle_unknown="ignore"),
    "flags": lambda: MissingIndicator(features="all"),
    "histograms": lambda: HistGradientBoostingRegressor(max_iter=2, categorical_features="from_dtype"),
}


def columns() -> dict[str, Any]:
    """Return columns of :data:`ROWS` cells by what they hold, their dtype and what is missing."""
    found = {}
    for kind, dtypes in DTYPES.items():
        drawn = np.array(CELLS[kind], object)[np.random.default_rng(1).integers(0, len(CELLS[kind]), ROWS)]
        for dtype, (gap, missing) in product(dtypes, GAPS.items()):
            cells = pd.Series(drawn, dtype=object)
            if gap != "whole":
                cells[1::4] = missing
            try:
                found[f"{kind} as {dtype}, {gap}"] = cells if dtype == "object" else cells.astype(dtype)
            except (TypeError, ValueError, ImportError):
                continue
    return found


COLUMNS = columns()


def every_case() -> list[Case]:
    """Return all encoders with all columns of a fit."""
    return list(product(ENCODERS, COLUMNS))


def fitted(case: Case) -> Any:
    """Return a fitted pipeline; None where the source cannot be fitted so."""
    encoder = ENCODERS[case[0]]()
    table = _table(COLUMNS[case[1]])
    if case[0] != "histograms":
        encoder = make_pipeline(make_column_transformer((encoder, ["k"]), remainder="passthrough"), Ridge())
    try:
        return encoder.fit(table, table.a + np.arange(ROWS) % 3)
    except Exception:  # noqa: BLE001  third-party code
        return None


def _table(column: Any) -> pd.DataFrame:
    return pd.DataFrame({"a": np.arange(float(ROWS)) % 7, "k": column})


def asked() -> Iterator[tuple[str, Any]]:
    """Yield tables with columns of all kinds, of many rows and of few."""
    for name, column in COLUMNS.items():
        table = _table(column)
        yield name, table
        yield f"{name}, few", table[:6]


class _ByColumns:
    """A translation that is given a frame's columns by their names."""

    def __init__(self, module: Any, kind: str) -> None:
        self.module, self.kind = module, kind

    def predict(self, x: pd.DataFrame) -> Any:
        """Return the translation's answer."""
        return self.module.predict({name: getattr(x[name], self.kind)() for name in x})


def _without_a_frame(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the frames that pandas makes of columns alone; none of NA, which no column without a frame is read as."""
    if any(type(cell).__name__ == "NAType" for cell in table["k"].tolist()):
        return {}
    return {
        kind: pd.DataFrame({name: getattr(table[name], kind)() for name in table}) for kind in ("to_numpy", "tolist")
    }


def run(cases: Iterable[Case], tally: Tally, *, every: int = 1) -> None:
    """Compare each pipeline's translation with it on every so many-th table."""
    warnings.simplefilter("ignore")
    for case in cases:
        source = fitted(case)
        if source is None:
            continue
        try:
            module = translate(source)
        except MlsysError as error:
            tally.add("refused", str(case), str(error)[:90])
            continue
        own = [(case[1], _table(COLUMNS[case[1]])), (f"{case[1]}, few", _table(COLUMNS[case[1]])[:6])]
        others = list(asked())
        for label, x in own + random.Random(0).sample(others, len(others) // every):
            where = f"{case[0]} of {case[1]}: {label}"
            compare(source, module, "predict", x, where, tally)
            for kind, made in _without_a_frame(x).items():
                compare(source, _ByColumns(module, kind), "predict", made, f"{where} by {kind}", tally)


def main() -> int:
    """Print faults, reasons and the tally; return 1 if anything is wrong or raw."""
    tally = Tally()
    run(every_case(), tally)
    return tally.report("windtunnel_columns")


if __name__ == "__main__":
    sys.exit(main())
