"""Kernels compiled on demand: built once, rebuilt when their source changes, refused with the compiler's words."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlsys_core.errors import MissingDependencyError, MlsysError
from mlsys_core.native import load_kernel

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.cpp"
    path.write_text(SOURCE)
    return path


def libraries(cache: Path) -> list[Path]:
    return sorted((cache / "native").iterdir())


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


def test_what_does_not_compile_says_why_and_leaves_nothing(source: Path, tmp_path: Path):
    source.write_text("this is no C++")
    with pytest.raises(MlsysError, match=r"could not compile kernel.cpp: .*error"):
        load_kernel(source, cache_dir=tmp_path / "cache")
    assert libraries(tmp_path / "cache") == []


def test_without_a_compiler_the_message_says_what_to_install(source: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="apt-get install g"):
        load_kernel(source, cache_dir=tmp_path)


def test_a_changed_header_is_a_changed_kernel(tmp_path: Path) -> None:
    source, header = tmp_path / "answer.cpp", tmp_path / "answer.h"
    source.write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n')
    for number in (7, 8):
        header.write_text(f"#define ANSWER {number}\n")
        assert load_kernel(source, cache_dir=tmp_path, headers=[header]).answer() == number
