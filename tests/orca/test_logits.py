"""Effects of biases, penalties and masks on a row of logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.backends.drawing import reshaped
from mlsys_orca.backends.sampler import sample
from mlsys_orca.scheduling.batch import SamplingParams
from numpy.typing import NDArray
from transformers import RepetitionPenaltyLogitsProcessor

LOGITS = np.array([2.0, -1.0, 0.5, 0.0, -3.0], dtype=np.float32)
PAST = [1, 0, 2, 2]  # the first is the prompt's


class Only:
    """A guide that allows one token, by the length of the answer."""

    def allowed(self, answer: Sequence[int]) -> NDArray[np.bool_]:
        return np.arange(5) == len(answer)

    def foresee(self, answer: Sequence[int]) -> None:
        pass


def test_repetition_is_transformers_own_over_prompt_and_answer() -> None:
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([PAST]), torch.tensor(LOGITS)[None].clone())
    found = reshaped(LOGITS, SamplingParams(repetition_penalty=1.7), PAST, 1)
    assert found.tolist() == pytest.approx(expected[0].tolist())


def test_presence_and_frequency_count_the_answer_alone() -> None:
    found = reshaped(LOGITS, SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), PAST, 1)
    assert (LOGITS - found).tolist() == pytest.approx([0.75, 0, 1.0, 0, 0])


def test_bias_goes_first_and_the_row_is_not_changed() -> None:
    before = LOGITS.copy()
    found = reshaped(LOGITS, SamplingParams(logit_bias=((1, 3.0),), repetition_penalty=2.0), PAST, 1)
    assert found[1] == pytest.approx((-1 + 3) / 2)
    assert LOGITS.tolist() == before.tolist()


def test_late_tokens_and_guides_leave_only_what_may_come() -> None:
    early = SamplingParams(min_tokens=4, late_token_ids=(0, 3))
    assert np.isinf(reshaped(LOGITS, early, PAST, 1)).nonzero()[0].tolist() == [0, 3]
    assert not np.isinf(reshaped(LOGITS, early, [*PAST, 4], 1)).any()
    assert np.isfinite(reshaped(LOGITS, SamplingParams(guide=Only()), PAST, 1)).nonzero()[0].tolist() == [3]


def test_min_p_leaves_out_what_is_less_likely_than_its_share_of_the_best() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    drawn = {
        sample(
            logits[None],
            request_ids=["r"],
            positions=[position],
            params=[SamplingParams(temperature=1.0, min_p=0.4, seed=3)],
        )[0].token_id
        for position in range(300)
    }
    assert drawn == {0, 1}


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("nan")},
        {"logit_bias": ((0, float("inf")),)},
        {"min_tokens": -1},
        {"num_prompt_logprobs": 21},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_fields_without_a_meaning_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_only_requests_that_ask_for_nothing_are_plain() -> None:
    assert SamplingParams(temperature=1.0, top_p=0.5, min_p=0.1, num_logprobs=1).is_plain
    for asks in ({"logit_bias": ((0, 1.0),)}, {"min_tokens": 1}, {"presence_penalty": 0.1}, {"guide": Only()}):
        assert not SamplingParams(**asks).is_plain


def test_only_allowed_tokens_are_left() -> None:
    found = reshaped(LOGITS, SamplingParams(allowed_token_ids=(1, 4)), PAST, 1)
    assert np.isfinite(found).nonzero()[0].tolist() == [1, 4]
    with pytest.raises(InvalidInputError, match="allowed_token_ids"):
        SamplingParams(allowed_token_ids=(0,), min_tokens=1, late_token_ids=(0,))


def test_a_bad_sequence_loses_its_last_token_where_its_first_ones_stand_unless_nothing_is_left() -> None:
    def forbidden(*sequences: tuple[int, ...], **options: object) -> list[int]:
        params = SamplingParams(bad_sequences=sequences, **options)
        return np.isinf(reshaped(LOGITS, params, PAST, 1)).nonzero()[0].tolist()

    assert forbidden((3,), (2, 4), (2, 2, 0), (0, 1), (1, 0, 2, 2, 1)) == [0, 3, 4]
    assert forbidden((1,), allowed_token_ids=(1,)) == [0, 2, 3, 4]
    assert forbidden((2,), (3,), guide=Only()) == [0, 1, 2, 4]
