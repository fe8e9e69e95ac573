"""The suites' own parts at their smallest."""

from __future__ import annotations

import pytest
from mlsys_bench.dvabatch import ideal, over_http
from mlsys_core.bench import BenchContext
from mlsys_core.errors import InvalidInputError
from mlsys_dvabatch.stages.simulated import parse_stages
from rich.console import Console

QUICK = BenchContext(Console(quiet=True), is_quick=True, device="cpu", num_threads=1)


@pytest.mark.slow
def test_joining_never_costs() -> None:
    (row,) = ideal.run(QUICK, stage_ms="6+0.01,6+0.01", loads=(0.1,)).data["rows"]
    assert row["joined_ms"] <= row["whole_ms"]


def test_sizes_of_stages_raise_the_peak_where_stages_prefer_others() -> None:
    assert ideal.split_peak(parse_stages("6+0.01,6+0.01")) == 1.0
    by_stage = parse_stages("6+0,0+2")
    assert ideal.split_peak(by_stage) == 1.0, "a batch of the largest size costs no stage anything"
    rises = ideal.split_peak(_Rises())
    assert rises == pytest.approx((1.5 + 1.0) / (1.0 + 1.0))


class _Rises:
    """A stage that is cheapest at two requests, and one that is at one."""

    num_stages = 2

    def stage_s(self, stage: int, num: int, length: int = 1) -> float:
        each_s = (1.5, 1.0) if stage == 0 else (1.0, 1.5)
        return num * (each_s[num - 1] if num < 3 else 4.0)


def test_servers_are_named() -> None:
    with pytest.raises(InvalidInputError, match="name running servers"):
        over_http.run(QUICK)


def test_texts_have_the_lengths_of_their_workload() -> None:
    assert len(over_http.texts_like("RTE", 5)) == 5
