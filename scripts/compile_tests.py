"""Compile the tests as pytest does, with their asserts rewritten: once, on all cores, and not once in each worker.

pytest keeps what it compiles only where Python may write bytecode, and workers that start together compile every file
each. Its plugins are among those files. What is compiled already is left alone.
"""

from __future__ import annotations

import os
import py_compile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from importlib.metadata import distributions
from importlib.util import cache_from_source
from pathlib import Path

from _pytest.assertion import rewrite

ROOT = Path(__file__).resolve().parent.parent


def test_files() -> Iterator[Path]:
    """Yield the Python files beside tests, and pytest's plugins."""
    yield ROOT / "conftest.py"
    for top in (ROOT / "tests", *ROOT.glob("p*/*/tests")):
        yield from top.rglob("*.py")
    for each in distributions():
        if any(entry.group == "pytest11" for entry in each.entry_points):
            files = (Path(str(file.locate())) for file in each.files or () if file.suffix == ".py")
            yield from filter(Path.exists, files)


def compile_one(path: Path) -> None:
    """Compile a file unless that was done after its last change: as pytest would, or what tests import as Python would.

    A file that does not compile is left to pytest, which says why.
    """
    is_helper = path.is_relative_to(ROOT / "tests") and not path.name.startswith(("test_", "conftest."))
    tail = rewrite.PYC_TAIL
    kept = Path(cache_from_source(str(path))) if is_helper else rewrite.get_cache_dir(path) / (path.stem + tail)
    if kept.exists() and kept.stat().st_mtime > path.stat().st_mtime:
        return
    if is_helper:
        py_compile.compile(str(path), quiet=2)
        return
    with suppress(SyntaxError):
        stat, code = rewrite._rewrite_test(path, None)  # type: ignore[arg-type]  # it reads one setting, off without
        kept.parent.mkdir(exist_ok=True)
        written = kept.with_name(f"{kept.name}.{os.getpid()}")
        with written.open("wb") as file:
            rewrite._write_pyc_fp(file, stat, code)
        written.replace(kept)


if __name__ == "__main__":
    with ProcessPoolExecutor() as pool:
        list(pool.map(compile_one, sorted(set(test_files())), chunksize=8))
