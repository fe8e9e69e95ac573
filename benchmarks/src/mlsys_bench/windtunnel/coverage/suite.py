"""The suite ``windtunnel-coverage``: every source is translated by every contestant and its answers are compared.

Outcomes: ``exact`` (all methods within 1e-6, labels equal), ``host`` (exact, with a step that stays as it is),
``close`` (within 1e-3: float32), ``refused`` (with its reason), ``crashed`` (a translation that does not answer),
``wrong`` (other answers, and nothing said).
"""

from __future__ import annotations

import importlib.util
import warnings
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from mlsys_core.report import Section, Table

from mlsys_bench.windtunnel.coverage import options
from mlsys_bench.windtunnel.coverage.cases import Case, estimators, pipelines
from mlsys_bench.windtunnel.coverage.contestants import CONTESTANTS, METHODS, RefusedError

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

EXACT, CLOSE = 1e-6, 1e-3
OUTCOMES = ("exact", "host", "close", "refused", "crashed", "wrong")


def run(context: BenchContext) -> Section:
    """Translate and compare; quick takes every tenth estimator, and option sets of every tenth class."""
    warnings.simplefilter("ignore")
    names = [name for name, (package, _) in CONTESTANTS.items() if importlib.util.find_spec(package)]
    absent = [name for name in CONTESTANTS if name not in names]
    results: list[dict[str, Any]] = []
    every = 10 if context.is_quick else 1
    for number, case in enumerate(chain(pipelines(), estimators(), options.cases(every=every))):
        if context.is_quick and case.family == "estimators" and number % 10:
            continue
        row: dict[str, Any] = {"family": case.family, "name": case.name}
        for name in names:
            outcome, reason = judged_within(case, name)
            row[name] = {"outcome": outcome, "reason": reason[:300]}
        results.append(row)
    families = list(dict.fromkeys(row["family"] for row in results))
    tally = {
        (family, name): Counter(row[name]["outcome"] for row in results if row["family"] == family)
        for family in families
        for name in names
    }
    cells = [
        [family if name == names[0] else "", name, *(str(tally[family, name][each] or "") for each in OUTCOMES)]
        for family in families
        for name in names
    ]
    short = [
        [row["family"], row["name"], row[names[0]]["outcome"], row[names[0]]["reason"]]
        for row in results
        if row[names[0]]["outcome"] in ("refused", "crashed", "wrong", "close")
    ]
    body: list[Any] = [
        Table(["family", "translator", *OUTCOMES], cells, f"{len(results)} fitted sources, each compared on its rows"),
        Table(["family", "source", "WindTunnel", "reason"], short, "where WindTunnel is not exact"),
    ]
    if absent:
        body.append(f"Not installed, so not measured: {', '.join(absent)} (benchmarks/peers/windtunnel).")
    ours = sum((tally[family, names[0]] for family in families), Counter())
    return Section(
        "WindTunnel: what translates, beside peers",
        body,
        status="failed" if ours["wrong"] or ours["crashed"] else "ok",
        data={"results": results, "absent": absent},
    )


def judged(case: Case, name: str) -> tuple[str, str]:
    """Return the outcome of one contestant on one source, and why."""
    try:
        answers, note = CONTESTANTS[name][1](case.source, case.rows)
    except RefusedError as error:
        return "refused", " ".join(str(error).split())
    except Exception as error:  # noqa: BLE001  third-party code
        return "crashed", f"{type(error).__name__}: {' '.join(str(error).split())}"
    farthest, compared = 0.0, 0
    for method in METHODS:
        if method not in answers or not hasattr(case.source, method):
            continue
        try:
            expected = getattr(case.source, method)(case.rows)
        except Exception:  # noqa: BLE001  the source itself refuses
            continue
        try:
            got = answers[method](case.rows)
        except Exception as error:  # noqa: BLE001  third-party code
            return "crashed", f"{method}: {type(error).__name__}: {' '.join(str(error).split())}"
        farthest, compared = max(farthest, distance(expected, got)), compared + 1
    if not compared:
        return "crashed", "it answers none of the source's methods"
    if farthest > CLOSE:
        return "wrong", f"differs by {farthest:.3g}"
    if farthest > EXACT:
        return "close", f"differs by {farthest:.1e}"
    return ("host", note) if note else ("exact", "")


def judged_within(case: Case, name: str) -> tuple[str, str]:
    """Return the outcome of one contestant; a transformer that is refused alone is tried before a linear model."""
    alone = judged(case, name)
    if alone[0] != "refused" or case.target is None or hasattr(case.source, "predict"):
        return alone
    try:
        pipeline = in_pipeline(case)
    except Exception:  # noqa: BLE001  third-party code: its features suit no linear model
        return alone
    within = judged(pipeline, name)
    return alone if within[0] == "refused" else within


def in_pipeline(case: Case) -> Case:
    """Return a transformer as the first step of a pipeline that ends in a ridge regression.

    Columns of text that it leaves in a frame are encoded between the two.
    """
    from sklearn.base import clone
    from sklearn.compose import make_column_selector, make_column_transformer
    from sklearn.linear_model import Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder

    steps = [clone(case.source), Ridge()]
    if hasattr(case.rows, "columns"):
        texts = (OneHotEncoder(handle_unknown="ignore"), make_column_selector(dtype_exclude="number"))
        steps.insert(1, make_column_transformer(texts, remainder="passthrough"))
    fitted = make_pipeline(*steps).fit(case.rows, case.target)
    return Case(case.family, case.name, fitted, case.rows, case.target)


def distance(expected: Any, got: Any) -> float:
    """Return the largest relative difference of numbers, or 1 where a label or a shape differs."""
    if isinstance(expected, list):
        is_alike = isinstance(got, list) and len(got) == len(expected)
        return max(map(distance, expected, got)) if is_alike else 1.0
    expected, got = (np.asarray(each.toarray() if hasattr(each, "toarray") else each) for each in (expected, got))
    if expected.shape != got.shape:
        if expected.size != got.size:
            return 1.0
        got = got.reshape(expected.shape)  # [rows, 1] for [rows]
    if expected.dtype.kind not in "fiub" or got.dtype.kind not in "fiub":
        return float((expected.astype(str) != got.astype(str)).any())
    expected, got = expected.astype(np.float64), got.astype(np.float64)
    if (np.isnan(expected) != np.isnan(got)).any():
        return 1.0
    gap = np.abs(expected - got) / np.maximum(1.0, np.abs(expected))
    return float(np.nanmax(np.where(expected == got, 0.0, gap), initial=0.0))
