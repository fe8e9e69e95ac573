"""Tables for boosters that read them in ways of their own, and the comparison of a source with its translation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from sklearn.pipeline import make_pipeline

X = np.random.default_rng(0).normal(size=(100, 3))
FRAME = pd.DataFrame(X, columns=list("abc"))
ROWS, NAMED = X[:4], FRAME[:4]
FITS: dict[str, Any] = {
    "array": X,
    "names": FRAME,
    "numbers": pd.DataFrame(X),
    "array in a pipeline": X,
    "names in a pipeline": FRAME,
}
SPECIAL = np.where(np.eye(4, 3, dtype=bool), np.array([[np.inf], [-np.inf], [np.nan], [1e300]]), ROWS)
TABLES: dict[str, Any] = {
    "array": ROWS,
    "inf": SPECIAL,
    "inf of float32": SPECIAL.astype(np.float32),
    "names": NAMED,
    "inf by name": pd.DataFrame(SPECIAL, columns=list("abc")),
    "reversed": NAMED[list("cba")],
    "more behind": NAMED.assign(z=1.0),
    "more before": NAMED.assign(z=1.0)[list("zabc")],
    "fewer": NAMED[["a", "b"]],
    "others": NAMED.rename(columns={"a": "q"}),
    "numbers": pd.DataFrame(ROWS),
    "numbers reversed": pd.DataFrame(ROWS)[[2, 1, 0]],
    "some names": NAMED.rename(columns={"a": 0}),
    "categories": NAMED.assign(a=pd.Categorical([1, 2, 1, 3])),
}


def check_each_table(source: Any, fit: str, stricter: dict[tuple[str, str], str]) -> None:
    """Fit a booster on a table of ``FITS``; each of ``TABLES`` is then answered alike, or refused.

    Args:
        source: Not fitted.
        fit: Key of ``FITS``.
        stricter: Words of the translation's refusals of tables that the source answers, by fit and table.
    """
    source = make_pipeline(source) if "pipeline" in fit else source
    source.fit(FITS[fit], X[:, 0])
    module = translate(source)
    for name, table in TABLES.items():
        try:
            expected = source.predict(table)
        except Exception:  # noqa: BLE001  of three libraries
            with pytest.raises(InvalidInputError):
                module.predict(table)
            continue
        refusal = stricter.get((fit.partition(" ")[0], name))
        if refusal is not None:
            with pytest.raises(InvalidInputError, match=refusal):
                module.predict(table)
        else:
            np.testing.assert_allclose(module.predict(table), expected, rtol=1e-5, atol=1e-6, err_msg=name)


def check_categories(source: Any) -> None:
    """Fit a booster on a frame whose column ``b`` is of categories; no other column may be such a one."""
    fitted = FRAME.assign(b=pd.Categorical(np.arange(100) % 3))
    source.fit(fitted, X[:, 0])
    module = translate(source)
    np.testing.assert_allclose(module.predict(fitted), source.predict(fitted), rtol=1e-5, atol=1e-6)
    for table in (fitted.assign(a=pd.Categorical(np.arange(100) % 3)), fitted.drop(columns="b")):
        with pytest.raises(Exception, match=r"."):
            source.predict(table)
        with pytest.raises(InvalidInputError):
            module.predict(table)
