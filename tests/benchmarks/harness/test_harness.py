"""The harness on cases made up here: comparison before time, reasons, ratios; child processes; the journal."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from mlsys_bench.harness.child import interpreter, run_in_child
from mlsys_bench.harness.journal import Journal
from mlsys_bench.harness.race import Case, LeftOut, Outcome, fastest, race, speed_up
from mlsys_bench.harness.text import geometric_mean, status_of, times_table, untimed
from mlsys_core.errors import InvalidInputError, MlsysError


def distance(result: float, expected: float) -> float:
    return abs(result - expected)


def fails(error: Exception):
    def make() -> Case:
        raise error

    return make


def run(**others):
    makers = {"base": lambda: Case(lambda: 1.0), **others}
    return race(makers, difference=distance, tolerance=0.1, slack=3, turn_s=0.0)


def test_only_a_case_that_is_right_is_timed():
    found = run(
        near=lambda: Case(lambda: 1.05, note="close"),
        far=lambda: Case(lambda: 2.0),
        none=lambda: Case(lambda: float("nan")),
        absent=fails(ModuleNotFoundError("x", name="peer")),
        other=fails(LeftOut("too slow")),
        broken=fails(RuntimeError("no kernel\nat all")),
        lost=fails(RuntimeError(f"no file {Path.home()}/net.onnx")),
    )
    assert {name: one.status for name, one in found.items()} == {
        "base": "timed",
        "near": "timed",
        "far": "differs",
        "none": "differs",
        "absent": "not installed",
        "other": "left out",
        "broken": "does not run",
        "lost": "does not run",
    }
    assert found["near"].note == "close"
    assert found["lost"].note == "RuntimeError: no file ~/net.onnx"  # results are published
    assert found["broken"].note == "RuntimeError: no kernel at all"
    assert found["absent"].note == "no package peer"
    assert all((one.median_s is None) == (one.status != "timed") for one in found.values())
    json.dumps({name: one.to_json() for name, one in found.items()}, allow_nan=False)


def test_the_first_cases_own_difference_is_allowed_with_slack():
    makers = {"base": lambda: Case(lambda: 1.2), "near": lambda: Case(lambda: 1.5), "far": lambda: Case(lambda: 1.7)}
    found = race(makers, difference=distance, expected=1.0, tolerance=0.1, slack=3, turn_s=0.0)
    assert [one.status for one in found.values()] == ["timed", "timed", "differs"]


def test_a_ratio_is_the_median_of_ratios_within_rounds():
    base = Outcome("timed", turns_s=((2.0, 2.0), (20.0,), (4.0,)))  # the machine was busy in the second round
    ours = Outcome("timed", turns_s=((1.0, 1.0), (10.0,), (1.0,)))
    assert speed_up(ours, base) == 2.0
    assert speed_up(ours, Outcome("differs")) is None
    assert fastest({"base": base, "ours": ours, "not": Outcome("differs")}, ("base", "ours", "not", "who")) == "ours"
    assert fastest({}, ("base",)) is None


def test_texts_of_outcomes():
    races = {
        "a": {"x": Outcome("timed", turns_s=((0.25,),)), "y": Outcome("differs", "by 1")},
        "b": {"y": Outcome("differs", "by 1")},
    }
    assert times_table(races, "net").rows == [["a", "250", "differs"], ["b", "-", "differs"]]
    assert untimed(races) == ["y: differs (by 1) on a, b"]
    assert (status_of(races, "x"), status_of(races, "y")) == ("ok", "failed")
    assert geometric_mean([2.0, None, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([None]) is None


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


def test_a_restart_goes_on(tmp_path: Path):
    path = tmp_path / "new" / "cells.jsonl"
    journal = Journal(path, {"rows": (1, 2)}, key="cell")
    journal.add({"cell": "a", "score": 0.5})
    with path.open("a") as file:
        file.write('{"cell": "b", "sco')  # a run ended here
    again = Journal(path, {"rows": [1, 2]}, key="cell")
    assert again.finished == {"a": {"cell": "a", "score": 0.5}}
    again.add({"cell": "b", "score": 1.0})
    assert list(Journal(path, {"rows": [1, 2]}, key="cell").finished) == ["a", "b"]


def test_another_setting_or_another_file_is_refused(tmp_path: Path):
    path = tmp_path / "cells.jsonl"
    Journal(path, {"rows": 1}, key="cell").begin()
    with pytest.raises(InvalidInputError, match="another setting"):
        Journal(path, {"rows": 2}, key="cell")
    path.write_text("not JSON\n")
    with pytest.raises(InvalidInputError, match="no journal"):
        Journal(path, {"rows": 1}, key="cell")
