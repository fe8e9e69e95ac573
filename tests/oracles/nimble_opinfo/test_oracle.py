"""The oracle itself notices what it is for."""

from __future__ import annotations

import torch

from tests.oracles.nimble_opinfo.cases import Case
from tests.oracles.nimble_opinfo.compare import compare
from tests.oracles.nimble_opinfo.judge import judge


def test_another_result_in_each_call_is_wrong_for_a_replay():
    calls: list[int] = []

    def counts(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + (len(calls) > 5)  # the first five calls are eager's

    assert judge(Case("counts", counts, (torch.ones(3),)), "reference").verdict == "wrong"


def test_an_exception_that_is_not_ours_is_raw_and_one_of_eager_is_no_case():
    calls: list[int] = []

    def breaks(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 5:
            raise KeyError("x")
        return x

    assert judge(Case("breaks", breaks, (torch.ones(3),)), "native").verdict == "raw"
    assert judge(Case("eager", lambda x: x.view(5), (torch.ones(3),)), "native").verdict == "not run"


def test_memory_that_nobody_wrote_is_no_result():
    written = judge(Case("zeros", lambda x: torch.empty(x.shape).fill_(0) + x, (torch.ones(3),)), "reference")
    assert written.verdict == "equal"
    unset = judge(Case("empty", lambda x: torch.empty(x.shape), (torch.ones(3),)), "reference")
    assert (unset.verdict, unset.reason) == ("not run", "eager gives another result each time: unset memory")
    assert not torch.are_deterministic_algorithms_enabled()


def test_differences_are_reported():
    one = torch.tensor([1.0, torch.nan])
    assert compare([one], [one.clone()]) == ""
    assert compare([one], [one + 1]).startswith("result 0: Tensor-likes are not close")
    assert compare([one], [one.double()]) == "result 0 is torch.float32[2], not torch.float64[2]"
    assert compare([one[:1]], [one]) == "result 0 is torch.float32[1], not torch.float32[2]"
    assert compare([torch.tensor([1, 2])], [torch.tensor([1, 3])]) == "result 0: 1 of 2 elements differ"
    assert compare([], [one]) == "0 results, not 1"
    assert compare([2], [3]) == "result 0 is 2, not 3"
