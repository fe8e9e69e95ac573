"""The page ``docs/ways/row.md`` lists the files that a row passes, from the method to the kernel and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from lightgbm import LGBMClassifier
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.module import WindTunnelModule
from mlsys_windtunnel.modules.native import kernel
from sklearn.compose import make_column_transformer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from tests.ways import ROOT, files_of_page, files_passed, num_lines

PAGE = "docs/ways/row.md"
FRAME = pd.DataFrame({"age": np.arange(400.0) % 70, "city": ["Bern", "Oslo"] * 200})

pytestmark = pytest.mark.skipif(kernel() is None, reason="needs the compiled kernel")


@pytest.fixture(scope="module")
def module() -> WindTunnelModule:
    columns = make_column_transformer((StandardScaler(), ["age"]), (OneHotEncoder(), ["city"]))
    return translate(make_pipeline(columns, LGBMClassifier(n_estimators=5, verbose=-1)).fit(FRAME, FRAME.age > 30))


def passed_by(module: WindTunnelModule, rows: Any) -> list[str]:
    module.predict_proba(rows)  # the program is planned once
    return files_passed(lambda: module.predict_proba(rows))


def test_a_rows_way(module: WindTunnelModule):
    passed = passed_by(module, FRAME[:1])
    assert files_of_page(PAGE) == passed
    assert f"{len(passed)} Python files" in (ROOT / PAGE).read_text()
    assert num_lines(passed) < 2800


def test_a_dictionarys_way_is_shorter(module: WindTunnelModule):
    row = {"age": np.array([41.0]), "city": np.array(["Oslo"], object)}
    passed = passed_by(module, row)
    assert "mlsys_windtunnel/host/few_rows.py" in passed
    assert f"so {len(passed)} files" in (ROOT / PAGE).read_text()
    assert {*passed} - {"mlsys_windtunnel/host/few_rows.py"} < {*files_of_page(PAGE)}
