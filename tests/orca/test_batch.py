import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_orca.scheduling.batch import BatchBuilder, SamplingParams


def test_rows_of_all_requests_stand_one_after_the_other() -> None:
    builder, greedy = BatchBuilder(), SamplingParams()
    builder.add("chunk", (5, 6, 7), num_computed_tokens=2, block_table=(3,), sampling=None)
    builder.add("decode", (9,), num_computed_tokens=11, block_table=(0, 1), sampling=greedy)
    batch = builder.build()
    assert (batch.token_ids, batch.positions) == ((5, 6, 7, 9), (2, 3, 4, 11))
    assert [(r.start, r.stop, r.num_tokens, r.context_len) for r in batch.requests] == [(0, 3, 3, 5), (3, 4, 1, 12)]
    assert [request.request_id for request in batch.sampled] == ["decode"]
    assert batch.num_tokens == 4


@pytest.mark.parametrize(("tokens", "computed"), [((), 0), ((1,), -1)])
def test_impossible_parts_are_refused(tokens: tuple[int, ...], computed: int) -> None:
    with pytest.raises(InvalidInputError, match="'a'"):
        BatchBuilder().add("a", tokens, num_computed_tokens=computed, block_table=(0,), sampling=None)


@pytest.mark.parametrize(
    ("num_tokens", "computed", "is_whole"), [(3, 0, False), (2, 1, False), (1, 3, False), (4, 0, True)]
)
def test_a_prompt_of_an_encoder_is_not_split(num_tokens: int, computed: int, is_whole: bool) -> None:
    builder = BatchBuilder()

    def add() -> None:
        tokens = (1,) * num_tokens
        builder.add("a", tokens, num_computed_tokens=computed, block_table=(0,), sampling=None, num_encoder_tokens=3)

    if not is_whole:
        with pytest.raises(InvalidInputError, match="its first 3 tokens, all at once"):
            add()
        return
    add()
    assert builder.build().requests[0].num_encoder_tokens == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("num_logprobs", -1),
        ("num_logprobs", 21),
    ],
)
def test_sampling_parameters_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(InvalidInputError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]
