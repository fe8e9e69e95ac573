"""Comparing greedy answers: equal ones, ties, wrong ones and ones cut short."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from mlsys_bench.orca import answers
from mlsys_bench.orca.answers import compare
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.scheduling.batch import GenerationRequest

REQUESTS = [
    GenerationRequest(request_id=str(i), prompt_token_ids=tuple(range(5, 25 + i)), max_new_tokens=3) for i in range(2)
]


def ranked(loaded: LoadedModel, index: int) -> list[int]:
    """Tokens after the request's prompt, most likely first."""
    logprobs = answers._logprobs(loaded, REQUESTS[index].prompt_token_ids)
    return sorted(logprobs, key=lambda token: -logprobs[token])


def test_equal_answers_and_requests_without_one(loaded: LoadedModel) -> None:
    comparison = compare({0: (7, 8), 1: (9,)}, {1: (9,)}, loaded=loaded, requests=REQUESTS)
    assert (comparison.num_compared, comparison.differences, str(comparison)) == (1, (), "1 equal")


def test_tokens_far_apart_are_wrong(loaded: LoadedModel) -> None:
    first, second = ranked(loaded, 1)[:2]
    comparison = compare({0: (7,), 1: (first, 3)}, {0: (7,), 1: (second, 4)}, loaded=loaded, requests=REQUESTS)
    (difference,) = comparison.differences
    assert (difference.index, difference.position, difference.is_tie) == (1, 0, False)
    assert difference.gap is not None
    assert difference.gap > 1e-3
    assert str(comparison) == "1 of 2 WRONG"


def test_tokens_as_close_as_the_arithmetic_tie(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ranked(loaded, 0)[:2]
    monkeypatch.setitem(answers._TIES, torch.float32, 1e9)
    comparison = compare({0: (first,)}, {0: (second,)}, loaded=loaded, requests=REQUESTS)
    assert (comparison.num_wrong, str(comparison)) == (0, "0 equal, 1 part at a tie")


def test_an_unlikely_token_and_an_answer_cut_short_never_tie(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(answers._TIES, torch.float32, 1e9)
    likely = ranked(loaded, 0)
    unlikely = next(token for token in range(260) if token not in likely)
    assert compare({0: (likely[0],)}, {0: (unlikely,)}, loaded=loaded, requests=REQUESTS).num_wrong == 1
    assert compare({0: (5, 6)}, {0: (5,)}, loaded=loaded, requests=REQUESTS).num_wrong == 1


def test_a_later_token_is_judged_after_the_common_beginning(loaded: LoadedModel) -> None:
    first = ranked(loaded, 0)[0]
    longer = dataclasses.replace(REQUESTS[0], prompt_token_ids=(*REQUESTS[0].prompt_token_ids, first))
    logprobs = answers._logprobs(loaded, longer.prompt_token_ids)
    one, other = sorted(logprobs, key=lambda token: -logprobs[token])[:2]
    (difference,) = compare({0: (first, one)}, {0: (first, other)}, loaded=loaded, requests=REQUESTS).differences
    assert difference.position == 1
    assert difference.gap == pytest.approx(logprobs[one] - logprobs[other], abs=1e-6)
