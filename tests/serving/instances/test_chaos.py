"""The tally of `chaos`: what makes it wrong, what it counts at the server, and the file that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlsys_core.errors import ServingError
from mlsys_serving.cli import chaos as command
from mlsys_serving.instances import chaos
from mlsys_serving.instances.chaos import ChaosTally, counted


@pytest.mark.parametrize("fault", ["num_different", "num_lost", "num_twice", "num_left"])
def test_each_fault_makes_a_run_wrong_and_repeated_requests_do_not(fault: str) -> None:
    tally = ChaosTally(num_answers=9, num_equal=9, num_repeated=4, troubled={"worker": 3})
    assert tally.num_wrong == 0
    setattr(tally, fault, 2)
    assert tally.num_wrong == 2


def test_counts_are_of_the_model_that_was_asked_for() -> None:
    text = 'runs{model="a.b",version="1"} 2.0\nruns{model="axb",version="1"} 7.0\nother_runs{model="a.b"} 5.0\n'
    assert counted(text, "runs", "a.b") == 2
    assert counted(text, "runs", "none") == 0


@pytest.mark.parametrize("num_lost", [0, 1])
def test_the_tally_is_written_also_if_it_is_wrong(
    num_lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tally = ChaosTally(num_answers=9, num_equal=9 - num_lost, num_lost=num_lost, troubled={"worker": 3})
    monkeypatch.setattr(chaos, "run_chaos", lambda *_, **__: tally)
    options = {"seconds": 5.0, "every": 1.0, "streams": 2, "seed": 7, "out": tmp_path / "results"}
    if num_lost:
        with pytest.raises(ServingError, match="1 of 9 answers"):
            command.chaos(["dvabatch", "serve", "m"], "m", **options)
    else:
        command.chaos(["dvabatch", "serve", "m"], "m", **options)
    record = json.loads((tmp_path / "results" / "dvabatch-chaos.json").read_text())
    assert record["environment"]["python"]
    expected = {"model": "m", "seed": 7, "every_s": 1.0, "num_lost": num_lost, "num_twice": 0}
    expected["troubled"] = {"worker": 3}
    assert expected.items() <= record["results"].items()
