"""A third party's converter, installed: ``translate`` finds it; without it the estimator stays a fallback."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import venv
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
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that sees this one's packages and holds the plugin; needs no index."""
    root = tmp_path_factory.mktemp("env")
    venv.create(root, with_pip=False, symlinks=True)
    interpreter = root / "bin" / "python"
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    purelib = subprocess.run([interpreter, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    parents = [path for path in site.getsitepackages() if Path(path).is_dir()]
    lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in parents)
    (Path(purelib) / "parent.pth").write_text(lines)
    command = [sys.executable, "-m", "pip", "--python", str(interpreter), "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--no-index", "--no-build-isolation", str(PLUGIN)], check=True)
    return interpreter


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
