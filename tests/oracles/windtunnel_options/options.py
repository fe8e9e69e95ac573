"""Every class of each library with up to five option sets, on inputs of all kinds, alone and among mixed columns."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd
from mlsys_bench.windtunnel.coverage.cases import Case
from mlsys_bench.windtunnel.coverage.suite import in_pipeline
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import translate
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline

from tests.oracles.tally import Tally
from tests.oracles.windtunnel_estimators.compare import METHODS, compare
from tests.oracles.windtunnel_estimators.inputs import of_numbers

SHOWN = 8  # rows of which inputs are made


def run(cases: Iterable[Case], tally: Tally, refusals: dict[str, str], *, every: int, seed: int = 0) -> None:
    """Compare each source with its translation.

    Args:
        cases: Fitted sources.
        tally: Where verdicts go.
        refusals: Where reasons go of what is not translated.
        every: Which share of the inputs is tried of each source, chosen by chance; the rows of the fit always are.
        seed: Of what is chosen.
    """
    rng = np.random.default_rng(seed)
    for case in cases:
        for name, source, inputs in _forms(case, rng):
            module = _translated(name, source, inputs, tally, refusals)
            if module is None:
                continue
            methods = [method for method in METHODS if hasattr(module, method)]
            for index, (label, x) in enumerate(inputs):
                if index and int(rng.integers(every)):
                    continue
                for method in methods:
                    where = f"{name}.{method}, {label}"
                    if not hasattr(source, method):
                        tally.add("wrong", where, "the source has no such method")
                        continue
                    compare(source, module, method, iter(x) if label == "generator" else x, where, tally)


def _translated(name: str, source: Any, inputs: Any, tally: Tally, refusals: dict[str, str]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return translate(source, inputs[0][1])
    except InvalidInputError as error:
        refusals[name] = str(error)
    except Exception as error:  # noqa: BLE001  third-party code
        tally.add("raw", name, f"translate: {type(error).__name__}: {error}"[:300])
    return None


def _forms(case: Case, rng: np.random.Generator) -> Iterator[tuple[str, Any, list[tuple[str, Any]]]]:
    """Yield a source alone, before a linear model where it transforms, and on some columns of a frame."""
    x = case.rows
    is_table = isinstance(x, np.ndarray) and x.ndim == 2
    inputs = list(of_numbers(x[:SHOWN], None, rng)) if is_table else [("as fitted", x), *_frames(x)]
    yield case.name, case.source, inputs
    if hasattr(case.source, "predict"):
        return
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            yield f"{case.name}, Ridge", in_pipeline(case).source, inputs
            if is_table:
                yield _among_columns(case)
        except InvalidInputError:
            raise
        except Exception:  # noqa: BLE001  third-party code: its features suit no linear model, or no part of a table
            return


def _among_columns(case: Case) -> tuple[str, Any, list[tuple[str, Any]]]:
    """Return a pipeline in which a transformer reads all columns of a frame but one."""
    names = [f"n{index}" for index in range(case.rows.shape[1])]
    frame = pd.DataFrame(case.rows, columns=names).assign(extra=np.arange(len(case.rows)) % 7)
    columns = ColumnTransformer([("t", clone(case.source), names)], remainder="passthrough", sparse_threshold=0)
    source = make_pipeline(columns, Ridge()).fit(frame, case.target)
    shown = frame[:SHOWN]
    return f"{case.name}, in columns", source, [("as fitted", frame), *_frames(shown)]


def _frames(frame: Any) -> list[tuple[str, Any]]:
    """Return a frame of pandas in other forms; nothing of what is no frame."""
    if not isinstance(frame, pd.DataFrame):
        return []
    found: list[tuple[str, Any]] = [
        ("one row", frame[:1]),
        ("nullable", frame.convert_dtypes()),
        ("Arrow", frame.convert_dtypes(dtype_backend="pyarrow")),
        ("columns reversed", frame[list(frame.columns)[::-1]]),
        ("a column less", frame[list(frame.columns)[1:]]),
    ]
    if importlib.util.find_spec("polars"):
        found.append(("polars", importlib.import_module("polars").from_pandas(frame)))
    return found
