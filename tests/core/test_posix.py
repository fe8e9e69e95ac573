"""Where Linux ends: all modules import without what it alone has (``scripts/check_repo.py`` finds its callers)."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from mlsys_core import posix
from mlsys_core.posix import machine

ROOT = Path(__file__).parents[2]
MODULES = {"fcntl", "resource", "termios", "tty", "pty", "pwd", "grp"}

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
         "setpgid killpg getpgid pread pwrite fdatasync O_DIRECTORY MFD_CLOEXEC EFD_NONBLOCK WNOHANG"),
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


def test_what_other_systems_lack_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for owner, names in (
        (os, "fork killpg pread pwrite memfd_create eventfd sched_getaffinity sched_setaffinity register_at_fork"),
        (os, "fdatasync O_DIRECTORY"),
        (socket, "AF_UNIX"),
    ):
        for name in names.split():
            monkeypatch.delattr(owner, name, raising=False)
    refused: list[Callable[[], object]] = [
        posix.fork,
        posix.message_pair,
        posix.stream_pair,
        posix.new_event,
        lambda: posix.memory_file("x"),
        lambda: posix.signal_group(1, 0),
        lambda: posix.read_at(0, 1, 0),
        lambda: posix.write_at(1, b"", 0),
    ]
    for call in refused:
        with pytest.raises(
            posix.UnsupportedSystemError, match=rf" on {sys.platform}; use Linux \(on Windows: WSL 2\)$"
        ):
            call()
    posix.at_fork(in_child=lambda: None)
    machine.run_on_core(0, 0)
    posix.sync_folder(tmp_path)
    assert machine.allowed_cores() is None
    assert machine.num_cores() == (os.cpu_count() or 1)
    with socket.socket() as end:
        assert not posix.is_local(end)


@pytest.mark.skipif(posix.can_supervise() is not None, reason=str(posix.can_supervise()))
def test_events_and_memory_pass_between_processes() -> None:
    ours, theirs = posix.message_pair()
    with ours, theirs:
        memory, counter, flag = posix.memory_file("test"), posix.new_event(counts=True), posix.new_event()
        os.ftruncate(memory, 8)
        posix.send_descriptors(ours, b"one message", [memory, counter, flag])
        data, fds = posix.receive_descriptors(theirs, 100, 4)
        assert data == b"one message"
        for fd in fds[1:]:
            posix.raise_event(fd)
            posix.raise_event(fd)
        assert posix.write_at(fds[0], b"kept", 2) == 4
        assert posix.read_at(memory, 8, 0) == b"\0\0kept\0\0"
        assert [posix.take_event(counter), posix.take_event(counter), posix.take_event(flag)] == [1, 1, 2]
        with pytest.raises(BlockingIOError):
            posix.take_event(flag)
        assert posix.is_local(theirs)
        for fd in (memory, counter, flag, *fds):
            os.close(fd)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says")
def test_private_memory_is_no_files_and_nobody_elses(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with path.open("r+b") as file:
        kinds = [
            mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
            mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS),
            mmap.mmap(file.fileno(), mmap.PAGESIZE, flags=mmap.MAP_PRIVATE),
        ]
    ranges = machine.private_memory()
    assert ranges == sorted(ranges)
    found = []
    for memory in kinds:
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        found.append(any(begin <= first < first + mmap.PAGESIZE <= end for begin, end in ranges))
    assert found == [True, False, False]
