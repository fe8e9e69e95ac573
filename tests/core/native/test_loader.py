"""Kernels compiled on demand: built once, rebuilt when their source changes, refused with the compiler's words."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlsys_core import config
from mlsys_core.errors import InvalidInputError, KernelUnavailableError, MissingDependencyError, MlsysError
from mlsys_core.native import compiler, levels, load_kernel, loader, store, warn_without_kernels

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing warned of, remembered or configured by other tests."""
    for name in ("CXX", "MLSYS_KERNEL_LEVEL", "MLSYS_SANITIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(loader, "_failures", {})
    monkeypatch.setattr(loader, "_warned", set())
    monkeypatch.setattr(compiler, "_hung", {})
    store.warn_once.cache_clear()
    config.settings.cache_clear()
    yield
    config.settings.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.cpp"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Set an environment variable that the settings are read from."""

    def to(name: str, value: str) -> None:
        monkeypatch.setenv(name, value)
        config.settings.cache_clear()

    return to


def libraries(cache: Path) -> list[Path]:
    return sorted((cache / "native").glob("*.so"))


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_kernel_is_built_once_and_called(source: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    assert load_kernel(source, cache_dir=cache).answer() == 42
    (built,) = libraries(cache)
    before = built.stat().st_mtime_ns
    assert load_kernel(source, cache_dir=cache).answer() == 42
    assert built.stat().st_mtime_ns == before


def test_a_changed_source_or_flag_is_another_library(source: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    load_kernel(source, cache_dir=cache)
    source.write_text(SOURCE.replace("42", "ANSWER"))
    assert load_kernel(source, cache_dir=cache, flags=("-DANSWER=7",)).answer() == 7
    assert load_kernel(source, cache_dir=cache, flags=("-DANSWER=8",)).answer() == 8
    assert len(libraries(cache)) == 3


def test_a_failed_compilation_says_why_and_leaves_nothing(source: Path, tmp_path: Path):
    source.write_text("this is no C++")
    with pytest.raises(MlsysError, match=r"could not compile kernel.cpp: .*error"):
        load_kernel(source, cache_dir=tmp_path / "cache")
    assert libraries(tmp_path / "cache") == []
    assert not [path for path in (tmp_path / "cache" / "native").iterdir() if path.suffix != ".lock"]


def test_without_a_compiler_the_message_says_what_to_install(source: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match=r"apt-get install g\+\+.*holds no kernel for this processor"):
        load_kernel(source, cache_dir=tmp_path)


def test_a_changed_header_is_a_changed_kernel(tmp_path: Path) -> None:
    source, header = tmp_path / "answer.cpp", tmp_path / "answer.h"
    source.write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n')
    for number in (7, 8):
        header.write_text(f"#define ANSWER {number}\n")
        assert load_kernel(source, cache_dir=tmp_path, headers=[header]).answer() == number


# A cache that others could have written to, or that is damaged.


def in_another_process(source: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """Load and call the kernel where no library of it is open yet."""
    script = (
        "import sys; from pathlib import Path; from mlsys_core.native import load_kernel\n"
        "print(load_kernel(Path(sys.argv[1]), cache_dir=Path(sys.argv[2])).answer())"
    )
    command = [sys.executable, "-c", script, str(source), str(cache)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty", "unlisted", "nonsense"])
def test_a_damaged_library_is_built_again(damage: str, source: Path, tmp_path: Path):
    load_kernel(source, cache_dir=tmp_path / "first")
    (good,) = libraries(tmp_path / "first")
    cache = tmp_path / "cache"
    shutil.copytree(tmp_path / "first", cache)
    (library,) = libraries(cache)
    whole = library.read_bytes()
    manifest = library.with_name(library.name + ".json")
    match damage:
        case "truncated":
            library.write_bytes(whole[: len(whole) // 2])
        case "changed":
            library.write_bytes(whole[:-100] + bytes(100))
        case "empty":
            library.write_bytes(b"")
        case "unlisted":
            manifest.unlink()
        case "nonsense":
            manifest.write_text("[1]")
    result = in_another_process(source, cache)
    assert (result.returncode, result.stdout) == (0, "42\n"), result.stderr
    assert len(result.stderr.splitlines()) <= 2  # the damage, and that it compiles
    assert library.read_bytes() == good.read_bytes()
    assert "sha256" in json.loads(manifest.read_text())


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o757])
def test_a_folder_that_others_can_write_to_is_not_loaded_from(mode: int, source: Path, tmp_path: Path, caplog):
    cache = tmp_path / "cache"
    (cache / "native").mkdir(parents=True)
    (cache / "native").chmod(mode)
    assert load_kernel(source, cache_dir=cache).answer() == 42
    assert load_kernel(source, cache_dir=cache, flags=("-DOTHER",)).answer() == 42
    (record,) = caplog.records
    assert "other users can write to" in record.getMessage()
    assert "chmod go-w" in record.getMessage()
    assert libraries(cache) == []


def test_folders_above_must_be_safe_too(tmp_path: Path):
    inner = tmp_path / "outer" / "cache" / "native"
    assert store.problem_of(inner) is None
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer").chmod(0o777)
    assert "other users can write to" in (store.problem_of(inner) or "")
    (tmp_path / "outer").chmod(0o1777)  # as /tmp: nobody else renames what is in it
    assert store.problem_of(inner) is None


def test_a_link_is_judged_by_what_it_leads_to(tmp_path: Path, caplog):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to("open")
    (tmp_path / "good").symlink_to("mine")
    assert store.trusted_store(tmp_path / "link") is None
    assert store.trusted_store(tmp_path / "good") == store.Store(tmp_path / "mine")
    assert len(caplog.records) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_folder_or_library_of_another_user_is_not_loaded_from(source: Path, tmp_path: Path, caplog):
    cache = tmp_path / "cache"
    load_kernel(source, cache_dir=cache)
    (library,) = libraries(cache)
    os.chown(library, 12345, 12345)
    assert store.Store(library.parent).find(library.name) is None
    os.chown(library, 0, 0)
    assert store.Store(library.parent).find(library.name) == library
    os.chown(library.parent, 12345, 12345)
    assert load_kernel(source, cache_dir=cache).answer() == 42
    assert "belongs to another user (12345)" in caplog.text


@pytest.mark.parametrize("obstacle", ["file", "missing parent"])
def test_a_cache_that_cannot_be_written_costs_one_line(obstacle: str, source: Path, tmp_path: Path, caplog):
    cache = tmp_path / "cache"
    if obstacle == "file":
        cache.write_text("")
    else:
        cache = Path("/proc/no-such-folder")
    for flags in ((), ("-DOTHER",)):
        assert load_kernel(source, cache_dir=cache, flags=flags).answer() == 42
    (record,) = caplog.records
    assert "set MLSYS_CACHE_DIR" in record.getMessage()


def test_a_read_only_cache_is_read(source: Path, tmp_path: Path, caplog, monkeypatch):
    cache = tmp_path / "cache"
    load_kernel(source, cache_dir=cache)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(store.Store, "alone", refuse)
    assert load_kernel(source, cache_dir=cache).answer() == 42
    assert not caplog.records


# Compilers.


def test_a_library_by_another_compiler_serves_where_there_is_none(source: Path, tmp_path: Path, configure):
    wrapper = program(
        tmp_path / "other++", f'[ "$1" = --version ] && echo other 1.0 && exit\nexec {shutil.which("c++")} "$@"'
    )
    configure("CXX", str(wrapper))
    cache = tmp_path / "cache"
    assert load_kernel(source, cache_dir=cache).answer() == 42
    configure("PATH", str(tmp_path / "nothing"))
    configure("CXX", "")
    assert load_kernel(source, cache_dir=cache).answer() == 42
    source.write_text(SOURCE + "// changed")
    with pytest.raises(KernelUnavailableError, match=r"no C\+\+ compiler was found"):
        load_kernel(source, cache_dir=cache)


def test_without_a_compiler_a_lower_level_serves(source: Path, tmp_path: Path, configure):
    if not levels.LEVELS:
        pytest.skip("this processor's family has no levels")
    cache = tmp_path / "cache"
    configure("MLSYS_KERNEL_LEVEL", "x86-64")
    load_kernel(source, cache_dir=cache)
    configure("PATH", str(tmp_path / "nothing"))
    configure("MLSYS_KERNEL_LEVEL", "native")
    assert load_kernel(source, cache_dir=cache).answer() == 42
    configure("CXX", "/no/such/compiler")
    assert load_kernel(source, cache_dir=cache).answer() == 42


def test_two_compilers_keep_a_library_each(source: Path, tmp_path: Path, configure):
    cache = tmp_path / "cache"
    load_kernel(source, cache_dir=cache)
    wrapper = program(
        tmp_path / "other++", f'[ "$1" = --version ] && echo other 1.0 && exit\nexec {shutil.which("c++")} "$@"'
    )
    configure("CXX", f"env {wrapper}")
    load_kernel(source, cache_dir=cache)
    assert len(libraries(cache)) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("echo broken >&2; exit 1", "does not run: broken"),
        ("[ $1 = --version ] && exit; echo cc1plus is missing >&2; exit 1", "cc1plus is missing"),
        ("[ $1 = --version ] && exit; exit 3", "exit status 3"),
    ],
)
def test_a_compiler_that_fails_is_one_line(text: str, says: str, source: Path, tmp_path: Path, configure):
    configure("CXX", str(program(tmp_path / "broken++", text)))
    with pytest.raises(KernelUnavailableError, match=says) as caught:
        load_kernel(source, cache_dir=tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_a_compiler_that_hangs_is_ended_with_all_that_it_started(source: Path, tmp_path: Path, configure, monkeypatch):
    pids = tmp_path / "pids"
    text = f"[ $1 = --version ] && exit\nsleep 1000 & echo $! >> {pids}; wait"
    configure("CXX", str(program(tmp_path / "hangs++", text)))
    whole = compiler.Compiler.compile

    def hurried(self: compiler.Compiler, *args: object) -> None:
        whole(self, *args, timeout_s=2.0)

    monkeypatch.setattr(compiler.Compiler, "compile", hurried)
    for flags in ((), ("-DOTHER",)):  # the second kernel does not wait again
        with pytest.raises(KernelUnavailableError, match=r"took more than 2 s.*set CXX to another compiler"):
            load_kernel(source, cache_dir=tmp_path / "cache", flags=flags)
    started = pids.read_text().split()
    assert len(started) <= 1
    for pid in started:
        while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
            time.sleep(0.01)  # it was killed, and is about to go


def test_a_kernel_that_failed_is_not_compiled_again(source: Path, tmp_path: Path, configure):
    runs = tmp_path / "runs"
    text = f"[ $1 = --version ] && exit\necho run >> {runs}; echo no >&2; exit 1"
    configure("CXX", str(program(tmp_path / "broken++", text)))
    for _ in range(2):
        with pytest.raises(KernelUnavailableError, match="no"):
            load_kernel(source, cache_dir=tmp_path / "cache")
    assert runs.read_text() == "run\n"


def test_a_subsystem_says_once_that_it_has_no_kernels(caplog):
    error = KernelUnavailableError("no C++ compiler was found: apt-get install g++")
    for what in ("Nimble", "Orca", "Nimble"):
        warn_without_kernels(what, "torch's operators run", error)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert caplog.messages[0] == (
        "Nimble: torch's operators run, which is slower, for want of native kernels: "
        "no C++ compiler was found: apt-get install g++"
    )


def test_threads_of_one_process_build_it_once(source: Path, tmp_path: Path, configure):
    from concurrent.futures import ThreadPoolExecutor

    runs = tmp_path / "runs"
    text = f'[ "$1" = --version ] && echo counting && exit\necho run >> {runs}; exec {shutil.which("c++")} "$@"'
    configure("CXX", str(program(tmp_path / "counting++", text)))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: load_kernel(source, cache_dir=tmp_path / "cache"), range(4)))
    assert [library.answer() for library in found] == [42] * 4
    assert runs.read_text() == "run\n"


# Sanitizers.


def test_a_sanitizer_that_is_unknown_or_not_preloaded_is_refused(source: Path, tmp_path: Path, configure):
    configure("MLSYS_SANITIZE", "memory")
    with pytest.raises(InvalidInputError, match="'memory'; it may be address, undefined, thread"):
        load_kernel(source, cache_dir=tmp_path)
    if "libasan" not in os.environ.get("LD_PRELOAD", ""):
        for names in ("address", "undefined,address"):
            configure("MLSYS_SANITIZE", names)
            with pytest.raises(InvalidInputError, match="LD_PRELOAD="):
                load_kernel(source, cache_dir=tmp_path)
    configure("MLSYS_SANITIZE", "undefined,memory")
    with pytest.raises(InvalidInputError, match="'undefined,memory'; it may be address, undefined, thread, or two"):
        load_kernel(source, cache_dir=tmp_path)


def test_sanitizers_are_joined_unless_they_exclude_each_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loader, "_is_in_process", lambda runtime: True)
    flags = loader.sanitizer_flags("address, undefined")
    assert {"-fsanitize=address", "-fsanitize=undefined,float-cast-overflow"} <= set(flags)
    with pytest.raises(InvalidInputError, match="address and thread exclude each other"):
        loader.sanitizer_flags("address,thread")


def test_the_library_is_a_plain_ctypes_one(source: Path, tmp_path: Path):
    assert isinstance(load_kernel(source, cache_dir=tmp_path), ctypes.CDLL)


def test_a_compiler_does_not_inherit_what_is_preloaded(source: Path, tmp_path: Path, configure):
    said = tmp_path / "said"
    text = f'echo "[$LD_PRELOAD]" >> {said}\nexec {shutil.which("c++")} "$@"'
    wrapper = program(tmp_path / "tells++", text)
    configure("LD_PRELOAD", "libm.so.6")
    configure("CXX", str(wrapper))
    assert load_kernel(source, cache_dir=tmp_path / "cache").answer() == 42
    assert set(said.read_text().split()) == {"[]"}
