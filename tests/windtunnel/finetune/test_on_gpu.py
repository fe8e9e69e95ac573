"""Training on a CUDA device comes to what training on the CPU comes to, within rounding that steps magnify."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from tests.windtunnel.finetune.test_fine_tune import KINDS, MODULE, X, Y, tuned

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("level", ["L1", "L2", "L3", "L4"])
def test_a_tuned_pipeline_answers_alike(level: str) -> None:
    host, gpu = (tuned(copy.deepcopy(MODULE), level=level, device=device).module for device in ("cpu", "cuda"))
    apart = np.abs(host.predict_proba(X) - gpu.predict_proba(X))
    assert apart.mean() < 1e-3
    moved = np.abs(host.predict_proba(X) - MODULE.predict_proba(X)).mean()
    assert moved > 3 * apart.mean()  # both learnt, and the same


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains(kind: str) -> None:
    from mlsys_windtunnel import fine_tune, translate

    source = KINDS[kind]
    y = source.predict(X) if kind == "regression" else Y
    result = fine_tune(translate(source), X, y, epochs=1, device="cuda")
    answer = result.module.predict(X)
    assert np.isfinite(np.asarray(answer, dtype=float)).all()
