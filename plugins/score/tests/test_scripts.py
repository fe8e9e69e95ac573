"""The page's pure modules, run by node: why a token waited, block tables, Markdown."""

from __future__ import annotations

import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="needs node; the browser's tests run the same modules")
def test_the_pure_modules(tmp_path: Path):
    page = resources.files("mlsys_score") / "assets"
    for name in ("model", "explain", "markdown", "server"):
        (tmp_path / f"{name}.js").write_text((page / f"{name}.js").read_text())
    (tmp_path / "package.json").write_text('{"type": "module"}')
    script = Path(__file__).with_name("check_page.js")
    (tmp_path / script.name).write_text(script.read_text())
    done = subprocess.run([str(NODE), str(tmp_path / script.name)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["checks", "passed"]
