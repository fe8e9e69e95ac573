"""The jail's command line, and the comparison of answers."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release_check", ROOT / "scripts" / "release_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["release_check"] = module
    spec.loader.exec_module(module)
    return module


def test_answers_are_compared(check: ModuleType):
    assert check.largest_difference([["a"], [1.0, 2.5]], [["a"], [1.0, 2.0]]) == 0.5
    for one, other in (("a", "b"), ([1.0], [1.0, 2.0]), (1.0, "1.0")):
        assert check.largest_difference(one, other) == float("inf")


@pytest.mark.parametrize("change", ["answer", "compiled", "cache", "doctor"])
def test_what_is_not_as_it_should_be_fails(check: ModuleType, change: str):
    names = ("orca generate", "orca serve", "batchmaker serve", "dvabatch serve", "nimble", "windtunnel predict")
    times = dict.fromkeys(
        (
            "help s",
            "orca generate s",
            "orca serve ready_s",
            "nimble import_s",
            "nimble prepare_s",
            "help cpu_s",
            "orca generate cpu_s",
            "nimble cpu_s",
        ),
        0.1,
    )

    def found() -> dict[str, object]:
        return {
            **{name: [1.0] for name in names},
            **times,
            "kernels": "a: /x/_built/a.so (0.0 s)\n",
            "doctor": "ok",
            "a said": "",
        }

    good = check.Report()
    check.compare(good, found(), found())
    assert good.failed == []
    changes = {
        "answer": {"nimble": [1.1]},
        "compiled": {"a said": "mlsys: compiling a.cpp"},
        "cache": {"kernels": "a: /c/a.so (1 s)"},
    }
    report = check.Report()
    check.compare(report, found(), {**found(), **changes.get(change, {"doctor": "broken"})})
    assert len(report.failed) == 1


def may_unshare() -> bool:
    """Return whether this user may make the jail here: root, with the tools, in a container that lets it."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv", "ip", "/usr/bin/python3"))):
        return False
    probe = ["unshare", "--mount", "--net", "sh", "-c", "mount -o remount,bind,ro / && ip link set lo up"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may_unshare(), reason="only root makes namespaces, and not everywhere")
def test_the_jail_is_one(check: ModuleType, tmp_path: Path):
    folder = Path("/var/tmp") / f"mlsys-{os.getpid()}"
    folder.mkdir()
    os.chown(folder, check.NOBODY, check.NOBODY)
    script = (
        "import os, pathlib, shutil\n"
        "pathlib.Path('written').write_text('')\n"
        "try: pathlib.Path('/var/tmp/elsewhere').write_text('')\n"
        "except OSError as error: print(error.errno, os.geteuid(), 'HOME' in os.environ, shutil.which('c++'))\n"
    )
    python = Path("/usr/bin/python3")  # one that nobody may run
    try:
        place = check.Place(python, folder, jailed=True)
        command = [part.replace(f"PATH={python.parent}", "PATH=/nowhere") for part in place.command(["-c", script])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stdout.split() == ["30", str(check.NOBODY), "False", "None"], done.stderr
        assert (folder / "written").exists()
    finally:
        (folder / "written").unlink(missing_ok=True)
        folder.rmdir()
