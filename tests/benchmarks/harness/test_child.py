"""Functions in processes of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from mlsys_bench.harness.child import interpreter, run_in_child
from mlsys_core.errors import InvalidInputError, MlsysError


def test_arguments_and_results_pass_as_json():
    assert run_in_child("statistics:median", {"data": [3, 1, 2]}) == 2


def test_the_message_has_the_last_words():
    with pytest.raises(MlsysError, match="no median for empty data"):
        run_in_child("statistics:median", {"data": []})


def test_the_interpreter(tmp_path: Path):
    default = tmp_path / ".peers/nimble"
    assert interpreter(None, default) == Path(sys.executable)
    python = default / "bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert interpreter(None, default) == interpreter(python, default) == python
    with pytest.raises(InvalidInputError, match=r"peers/nimble/requirements\.txt says how"):
        interpreter(tmp_path / "nowhere", default)
