"""Compiled tests are those that pytest takes, and a file that does not compile is left to pytest."""

from __future__ import annotations

import runpy
from pathlib import Path

from _pytest.assertion import rewrite

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "compile_tests.py"))


def test_pytest_takes_what_was_compiled(tmp_path: Path):
    source, kept = tmp_path / "test_it.py", tmp_path / "__pycache__" / f"test_it{rewrite.PYC_TAIL}"
    source.write_text("assert 1 == 1\n")
    SCRIPT["compile_one"](source)
    code = rewrite._read_pyc(source, kept)
    assert code is not None
    assert "@pytest_ar" in code.co_names
    source.write_text("assert 1 == 1  # changed\n")
    assert rewrite._read_pyc(source, kept) is None
    source.write_text("assert 1 ==\n")
    SCRIPT["compile_one"](source)
    assert rewrite._read_pyc(source, kept) is None


def test_it_finds_this_file_its_settings_and_a_plugin():
    names = {path.name for path in SCRIPT["test_files"]()}
    assert {"conftest.py", Path(__file__).name, "processes.py", "_hypothesis_pytestplugin.py"} <= names
