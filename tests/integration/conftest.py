"""Environments with packages of third parties, really installed."""

from __future__ import annotations

import site
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

Install = Callable[..., Path]


@pytest.fixture(scope="session")
def install(tmp_path_factory: pytest.TempPathFactory) -> Install:
    """A function from packages' folders to the interpreter of a new environment; needs no index.

    The environment sees this one's packages, and holds those.
    """

    def install(*packages: Path) -> Path:
        root = tmp_path_factory.mktemp("env")
        venv.create(root, with_pip=False, symlinks=True)
        python = root / "bin" / "python"
        script = "import sysconfig; print(sysconfig.get_path('purelib'))"
        purelib = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
        parents = [path for path in site.getsitepackages() if Path(path).is_dir()]
        lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in parents)
        (Path(purelib) / "parent.pth").write_text(lines)
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--no-index", "--no-build-isolation", *map(str, packages)], check=True)
        return python

    return install
