"""A plugin needs core and nothing else of this repository: its own tests, where only these two are installed."""

from __future__ import annotations

import os
import site
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGINS = ("batchmaker", "dvabatch")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=PLUGINS)
def plugin(request: pytest.FixtureRequest) -> str:
    """Its name."""
    return str(request.param)


@pytest.fixture(scope="module")
def python(plugin: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with this one's third-party packages, core, serving, a front and the plugin; needs no index."""
    root = tmp_path_factory.mktemp("alone")
    venv.create(root, with_pip=False, symlinks=True)
    python = root / "bin" / "python"
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    purelib = Path(subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout.strip())
    for parent in site.getsitepackages():
        for entry in Path(parent).iterdir():
            is_ours = "mlsys" in entry.name.lower()
            if not is_ours and entry.suffix != ".pth" and not (purelib / entry.name).exists():
                (purelib / entry.name).symlink_to(entry)
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    parts = ["packages/core", "packages/serving", "plugins/open-inference", f"plugins/{plugin}"]
    subprocess.run([*command, *(str(ROOT / part) for part in parts)], check=True)
    return python


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MLSYS_", "PYTEST_"))}
    command = [str(python), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)


def test_there_is_only_what_the_plugin_needs(plugin: str, python: Path):
    script = (
        "import importlib.metadata as m; print(sorted(d.name for d in m.distributions() if d.name.startswith('mlsys')))"
    )
    assert run(python, "-c", script).stdout.strip() == str(
        sorted(["mlsys-core", "mlsys-serving", "mlsys-open-inference", f"mlsys-{plugin}"])
    )
    listed = run(python, "-m", "mlsys_core", "plugins", "list")
    assert listed.returncode == 0, listed.stderr
    assert plugin in listed.stdout


@pytest.mark.timeout(1200)  # a hundred tests in one
def test_its_own_tests_load_and_those_of_its_server_and_commands_pass(plugin: str, python: Path):
    """All are imported, and what they import; what runs is the way from a command or a request down to a kernel.

    That no source names another distribution is `make lint`'s.
    """
    # The commands of mlsys-bench, and the pages that list a checkout's files, are not of the plugin.
    chosen = "(serve or service or test_cli) and not bench and not test_way"
    options = ["-q", "--quick", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", chosen]
    tested = run(python, "-m", "pytest", *options, f"plugins/{plugin}/tests")
    assert tested.returncode == 0, tested.stdout[-3000:]
    assert " passed" in tested.stdout
