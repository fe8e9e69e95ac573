"""A third party's converter, installed: ``translate`` finds it; without it the estimator stays a fallback."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parent / "windtunnel_plugin"
SCRIPT = """
import json
import numpy as np
from mlsys_mini_converter import SoftClipper
from mlsys_windtunnel.convert.translation import translate
from sklearn.ensemble import VotingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

x = np.random.default_rng(0).normal(size=(50, 3))
clipped = make_pipeline(SoftClipper(), LogisticRegression())
source = VotingClassifier([("clipped", clipped), ("plain", LogisticRegression())], voting="soft").fit(x, x[:, 0] > 0)
module = translate(source, x)
print(json.dumps({
    "difference": abs(module.predict_proba(x) - source.predict_proba(x)).max(),
    "fallbacks": module.frontend.fallbacks,
    "modules": [type(part).__name__ for part in module.network.operators],
    "parameters": len(list(module.network.parameters())),
}))
"""


@pytest.fixture(scope="module")
def python(install: Callable[..., Path]) -> Path:
    """The interpreter of an environment that sees this one's packages and holds the plugin; needs no index."""
    return install(PLUGIN)


def run(python: Path, folder: Path, **variables: str) -> dict[str, object]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MLSYS_")} | variables
    done = subprocess.run(
        [python, "-c", SCRIPT], capture_output=True, text=True, check=False, env=env, cwd=folder, timeout=120
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, object] = json.loads(done.stdout)
    return report


def test_translate_uses_the_plugin(python: Path, tmp_path: Path):
    report = run(python, tmp_path)
    assert report["difference"] < 1e-9
    assert report["fallbacks"] == []
    assert report["modules"] == ["Clip", "Classifier", "Classifier", "Vote"]


def test_without_it_the_estimator_stays_on_the_host(python: Path, tmp_path: Path):
    report = run(python, tmp_path, MLSYS_PLUGINS_BLOCK="mini-converter")
    assert report["difference"] < 1e-9
    assert report["fallbacks"] == ["mlsys_mini_converter.SoftClipper"]
    assert report["modules"] == ["Classifier", "Classifier", "Vote"]
