from collections import Counter

import pytest
import torch
from mlsys_orca.backends.drawing import uniform
from mlsys_orca.backends.sampler import sample
from mlsys_orca.scheduling.batch import SampledToken, SamplingParams


def draw(logits: torch.Tensor, params: SamplingParams, *, position: int = 0) -> SampledToken:
    return sample(logits[None], request_ids=["r"], positions=[position], params=[params])[0]


def frequencies(logits: torch.Tensor, num: int = 4000, **options: object) -> torch.Tensor:
    params = SamplingParams(temperature=options.pop("temperature", 1.0), seed=11, **options)  # type: ignore[arg-type]
    counts = Counter(draw(logits, params, position=position).token_id for position in range(num))
    return torch.tensor([counts[token] / num for token in range(len(logits))])


LOGITS = torch.tensor([2.0, 0.0, 1.0, -1.0, 1.5])


def test_greedy_takes_the_largest() -> None:
    assert draw(LOGITS, SamplingParams()).token_id == 0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)
    assert torch.allclose(frequencies(LOGITS, temperature=temperature), expected, atol=0.03)


def test_top_k_keeps_the_k_best() -> None:
    expected = torch.where(torch.tensor([1, 0, 0, 0, 1]).bool(), LOGITS, -torch.inf).softmax(-1)
    assert torch.allclose(frequencies(LOGITS, top_k=2), expected, atol=0.03)
    assert frequencies(LOGITS, 300, top_k=99).count_nonzero() == 5


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    # The softmax is .43 .06 .16 .02 .26: the best alone reaches .4, two reach .69, three .85.
    for top_p, kept in ((0.01, {0}), (0.4, {0}), (0.5, {0, 4}), (0.69, {0, 4}), (0.8, {0, 2, 4})):
        drawn = frequencies(LOGITS, 1000, top_p=top_p)
        assert set(drawn.nonzero().flatten().tolist()) == kept
        expected = torch.where(drawn > 0, LOGITS, -torch.inf).softmax(-1)
        assert torch.allclose(drawn, expected, atol=0.05)


def test_top_p_over_a_flat_distribution_looks_past_the_first_candidates() -> None:
    flat = torch.zeros(4096)
    drawn = {draw(flat, SamplingParams(temperature=1, top_p=0.99, seed=3), position=p).token_id for p in range(600)}
    assert len(drawn) > 500  # among 1024 candidates 600 draws would repeat more


def test_top_p_applies_after_top_k() -> None:
    assert set(frequencies(LOGITS, 500, top_k=2, top_p=0.5).nonzero().flatten().tolist()) == {0}


def test_a_requests_draw_depends_on_its_seed_and_position_only() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 50, generator=generator)
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(6)]
    together = sample(rows, request_ids=list("abcdef"), positions=[3] * 6, params=params)
    alone = [draw(rows[i], params[i], position=3).token_id for i in range(6)]
    assert [token.token_id for token in together] == alone
    assert [token.request_id for token in together] == list("abcdef")
    again = [draw(rows[0], params[0], position=p).token_id for p in range(30)]
    assert again == [draw(rows[0], params[0], position=p).token_id for p in range(30)]
    other = SamplingParams(temperature=1.0, seed=99)
    assert again != [draw(rows[0], other, position=p).token_id for p in range(30)]


def test_uniform_numbers_are_uniform() -> None:
    numbers = torch.tensor([uniform(seed, position) for seed in range(40) for position in range(100)])
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    assert torch.allclose(torch.histc(numbers, 10, 0, 1) / len(numbers), torch.full((10,), 0.1), atol=0.02)


def test_a_token_of_no_probability_is_never_drawn() -> None:
    logits = torch.tensor([0.0, -torch.inf, 0.0, -torch.inf])
    assert set(frequencies(logits, 500).nonzero().flatten().tolist()) == {0, 2}


def test_logprobs_are_the_models_own() -> None:
    expected = LOGITS.log_softmax(-1)
    token = draw(LOGITS, SamplingParams(temperature=3.0, top_k=1, num_logprobs=2))
    assert token.token_id == 0
    assert token.logprob == pytest.approx(float(expected[0]))
    assert [index for index, _ in token.top_logprobs] == [0, 4]
    assert token.top_logprobs[1][1] == pytest.approx(float(expected[4]))
    chosen_only = draw(LOGITS, SamplingParams(num_logprobs=0))
    assert (chosen_only.top_logprobs, chosen_only.logprob) == ((), pytest.approx(float(expected[0])))
    assert draw(LOGITS, SamplingParams()).logprob is None
