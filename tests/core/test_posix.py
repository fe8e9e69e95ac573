"""Where Linux ends: one module imports what other systems lack, and all others import without it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from mlsys_core import posix

ROOT = Path(__file__).parents[2]
MODULES = {"fcntl", "resource", "termios", "tty", "pty", "pwd", "grp"}
OWNER = "packages/core/src/mlsys_core/posix.py"
# A program of its own, which is run by its path: it can import nothing of ours.
APART = {"packages/orca/src/mlsys_orca/text/template_worker.py"}

# Third-party packages come first: they see to themselves. Then the world is made as poor as macOS or Windows are.
CODE = """
import importlib, os, pkgutil, signal, socket, sys
import asyncio, httpx, multiprocessing, subprocess, tempfile, torch, fastapi, uvicorn, rich.console, structlog, psutil
import networkx, matplotlib, numpy, platformdirs.unix, pluggy, prometheus_client, typer
import importlib.metadata, concurrent.futures
for name in {modules}:
    sys.modules[name] = None
gone = {{
    os: ("fork pidfd_open memfd_create eventfd sched_getaffinity sched_setaffinity register_at_fork geteuid getuid "
         "setpgid killpg getpgid pread pwrite fdatasync statvfs O_DIRECTORY MFD_CLOEXEC EFD_NONBLOCK WNOHANG"),
    signal: "SIGKILL SIGHUP SIGSTOP SIGCHLD SIGUSR1 pthread_sigmask pidfd_send_signal",
    socket: "AF_UNIX send_fds recv_fds",
}}
for owner, names in gone.items():
    for name in names.split():
        if hasattr(owner, name):
            delattr(owner, name)
failed = []
for top in {packages}:
    package = importlib.import_module(top)
    for found in pkgutil.walk_packages(package.__path__, top + "."):
        if found.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            if error.name in {modules}:
                failed.append(f"{{found.name}}: {{error}}")
        except (AttributeError, ImportError) as error:
            if any(name in str(error) for names in gone.values() for name in names.split()):
                failed.append(f"{{found.name}}: {{error}}")
print("\\n".join(failed))
sys.exit(bool(failed))
"""


def sources() -> list[Path]:
    return [path for kind in ("packages", "plugins") for path in ROOT.glob(f"{kind}/*/src/**/*.py")]


def imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            found.add(node.module)
    return found


def test_one_module_imports_what_other_systems_lack() -> None:
    users = {str(path.relative_to(ROOT)) for path in sources() if imported(path) & MODULES}
    assert users - APART == {OWNER}


def test_every_module_imports_without_them() -> None:
    packages = sorted({path.parts[len(ROOT.parts) + 3] for path in sources()})
    code = CODE.format(modules=sorted(MODULES), packages=packages)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_a_lock_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    with tempfile.TemporaryFile() as file:
        for lock in (posix.lock_file, posix.lock_for_process):
            with pytest.raises(posix.UnsupportedSystemError, match=r"^files cannot be locked on .*; use Linux"):
                lock(file.fileno())
    assert not posix.can_lock()
    assert not posix.is_own_group(os.getgid() if hasattr(os, "getgid") else 0)
    assert posix.open_files_limit(10) is None


@pytest.mark.skipif(not posix.can_lock(), reason="no locks here")
def test_a_lock_holds_until_its_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("a") as first, path.open("a") as second:
        assert posix.lock_file(first.fileno(), waits=False)
        assert not posix.lock_file(second.fileno(), waits=False)
        first.close()
        assert posix.lock_file(second.fileno(), waits=False)
