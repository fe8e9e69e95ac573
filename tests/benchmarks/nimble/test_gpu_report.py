"""The report of ``make bench-gpu`` from outcomes that need no GPU; without one the suite is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mlsys_bench.harness.race import Outcome
from mlsys_bench.nimble import gpu
from mlsys_bench.nimble.gpu import Race, report
from mlsys_bench.nimble.nets import run
from mlsys_core.errors import InvalidInputError
from mlsys_core.report import Table


def timed(seconds: float) -> Outcome:
    return Outcome("timed", "", 0.0, 1.0, ((seconds,) * 3,))


def test_inference_and_training_have_a_table_each():
    outcomes = {"eager": timed(0.02), "Nimble, one stream": timed(0.002), "Nimble": timed(0.001)}
    races = [Race("nasnet-mobile", False, outcomes), Race("resnet50, 32 x 32", True, {"eager": timed(0.01)})]
    section = report(races, device="some GPU")
    inference, training, _ = (item for item in section.body if isinstance(item, Table))
    assert list(inference.rows[0]) == ["nasnet-mobile", "20", "2", "1"]
    assert list(training.rows[0]) == ["resnet50, 32 x 32", "10"]
    assert json.loads(json.dumps(dict(section.data)))["races"][0]["outcomes"]["Nimble"]["median_s"] == 0.001
    assert section.status == "ok"


def test_a_wrong_answer_fails_the_section():
    section = report(
        [Race("darts", False, {"eager": timed(1.0), "Nimble": Outcome("differs", difference=1.0)})], device=""
    )
    assert section.status == "failed"
    assert "Nimble: differs on darts" in section.body


def test_a_race_compares_before_it_times_and_goes_on_without_who_fails():
    def broken() -> Any:
        raise RuntimeError("no kernel\nat all")

    x = torch.ones(3)
    makers = {"eager": lambda: lambda: [x], "late": lambda: lambda: [x * 2], "broken": broken}
    outcomes = gpu.race_on(makers, 0.0, synchronize=lambda: None, reserved=lambda: 0)
    assert [outcomes[name].status for name in makers] == ["timed", "differs", "does not run"]
    assert outcomes["broken"].note == "RuntimeError: no kernel at all"
    assert outcomes["eager"].median_s is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused():
    context: Any = SimpleNamespace(device="cuda", is_quick=True, console=None)
    with pytest.raises(InvalidInputError, match="torch sees no 'cuda'"):
        run(context)
