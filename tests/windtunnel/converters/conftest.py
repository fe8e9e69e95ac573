"""Checks for converters of trees beside ``same_answers``: both forms in torch answer so too, not only the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mlsys_windtunnel.modules.tree.trees import Trees


@pytest.fixture
def x() -> np.ndarray:
    """Rows to fit on; a file may have its own."""
    return np.random.default_rng(0).normal(size=(400, 5))


@pytest.fixture
def fresh() -> np.ndarray:
    """Rows to answer for."""
    return np.random.default_rng(1).normal(size=(200, 5))


@pytest.fixture
def without_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees are answered by torch, as on a machine without a compiler."""
    monkeypatch.setattr("mlsys_windtunnel.modules.tree.trees.native_sums", lambda trees, x: None)


@pytest.fixture
def same_in_each_layout(same_answers, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``same_in_each_layout(source, X, tolerance=0.0)`` -> the module; the tolerance is for the forms in torch."""

    def compare(source: Any, x: Any, *, tolerance: float = 0.0) -> Any:
        module = same_answers(source, x)
        (trees,) = (part for part in module.modules() if isinstance(part, Trees))
        method = "predict_proba" if hasattr(source, "predict_proba") else "predict"
        expected = getattr(source, method)(x)
        with monkeypatch.context() as patch:
            patch.setattr("mlsys_windtunnel.modules.tree.trees.native_sums", lambda trees, x: None)
            for layout in ("bits", "walk"):
                trees.use_layout(layout)
                np.testing.assert_allclose(getattr(module, method)(x), expected, rtol=0, atol=tolerance, err_msg=layout)
        return module

    return compare
