"""Who fails and who goes on, for any history of deaths."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from mlsys_orca.engine.recovery import Ledger, LiveRequest
from mlsys_orca.engine.work_watch import IterationDeadline
from mlsys_orca.scheduling.batch import (
    BatchBuilder,
    GenerationRequest,
    IterationBatch,
    SampledToken,
    SamplingParams,
    ScoredPrompt,
)
from mlsys_serving.processes.recovery import Turns, judge


def request(name: str, new: int = 50) -> GenerationRequest:
    return GenerationRequest(
        request_id=name, prompt_token_ids=(1, 2), max_new_tokens=new, stop_token_ids=frozenset({9})
    )


def simulate(num_requests: int, poisoned: set[int], max_batch: int) -> tuple[set[int], set[int], int]:
    """Run requests of three tokens each; who is poisoned kills at its second. Returns done, failed, deaths."""
    ledger = Ledger()
    for number in range(num_requests):
        ledger.open(request(str(number), new=3))
    order, done, failed, num_deaths = Turns(), set(), set(), 0
    while ledger.live:
        alone = order.alone
        batch = [ledger.live[alone]] if alone is not None else ledger.by_arrival()[:max_batch]
        turn = None if alone is None else ledger.live[alone]
        if any(live.number in poisoned and len(live.tokens) == 1 for live in batch):
            num_deaths += 1
            verdict = judge(batch, is_crash=True)
            for live in verdict.failed:
                failed.add(live.number)
                ledger.drop(live.handle)
                order.drop(live.handle)
            order.put_first([live.handle for live in verdict.suspects])
            continue
        for live in batch:
            live.tokens.append(SampledToken(live.request.request_id, 5))
            if live.finish_reason is not None:
                done.add(live.number)
                ledger.drop(live.handle)
                order.drop(live.handle)
        if turn is not None and turn.has_advanced:
            order.drop(turn.handle)
    return done, failed, num_deaths


@given(st.integers(1, 12), st.sets(st.integers(0, 11), max_size=3), st.integers(1, 6))
def test_a_poisoned_request_fails_alone_after_two_deaths_at_most(num: int, poisoned: set[int], max_batch: int):
    poisoned = {number for number in poisoned if number < num}
    done, failed, num_deaths = simulate(num, poisoned, max_batch)
    assert failed == poisoned
    assert done == set(range(num)) - poisoned
    assert num_deaths <= 2 * len(poisoned)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=30))
def test_kills_from_outside_fail_nobody_who_advances(advances: list[int]):
    live = LiveRequest(0, request("a"))
    for number in advances:
        live.tokens += [SampledToken("a", 5)] * number
        assert judge([live], is_crash=False).failed == judge([], is_crash=False).failed == ()
        assert judge([], is_crash=True).suspects == ()


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=12))
def test_who_is_alone_in_crashes_fails_at_the_second_in_one_place_or_the_fourth_in_any(deaths: list[tuple[int, bool]]):
    live, other = LiveRequest(0, request("a")), LiveRequest(1, request("b"))
    num_here = num_lone = 0
    for advance, is_alone in deaths:
        live.tokens += [SampledToken("a", 5)] * advance
        num_here = num_here + 1 if not advance and live.num_deaths else 1
        num_lone += is_alone
        other.num_computed_tokens += 1
        failed = judge([live] if is_alone else [live, other], is_crash=True).failed
        assert failed == ((live,) if is_alone and (num_here > 1 or num_lone > 3) else ())
        if failed:
            return


def test_who_stands_still_while_workers_are_killed_is_tried_alone_and_fails():
    still, other = LiveRequest(0, request("a")), LiveRequest(1, request("b"))
    verdicts = []
    for _ in range(3):
        other.num_computed_tokens += 1
        verdicts.append(judge([still, other], is_crash=False).suspects)
    assert verdicts == [(), (), (still,)]
    assert judge([still], is_crash=False).failed == (still,)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=2, max_size=6))
def test_who_lost_its_blocks_has_its_turn_until_it_is_further_than_at_any_death(places: list[tuple[int, int]]):
    live = LiveRequest(0, request("a"))
    for tokens, computed in places:  # those of deaths, in any order: blocks may be lost between
        live.tokens, live.num_computed_tokens = [SampledToken("a", 5)] * tokens, computed
        judge([live, LiveRequest(1, request("b"))], is_crash=True)
    assert live.place_at_death == max(places)
    assert live.has_advanced is False
    live.num_computed_tokens = 10
    assert live.has_advanced == (len(live.tokens) == max(places)[0])


def test_an_answer_is_complete_by_its_tokens_alone():
    live = LiveRequest(0, request("a", new=3))
    reasons = []
    for token in (4, 4, 4):
        live.tokens.append(SampledToken("a", token))
        reasons.append(live.finish_reason)
    assert reasons == [None, None, "length"]
    live.tokens[-1] = SampledToken("a", 9)
    assert live.finish_reason == "stop"


@given(st.integers(1, 40), st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=9), min_size=1, max_size=4))
def test_a_prompt_scored_again_in_other_pieces_is_told_once_and_whole(length: int, runs: list[list[int]]):
    """Each run begins anew and ends anywhere, the last at the end."""
    live, told = LiveRequest(0, request("a")), list[ScoredPrompt]()
    tokens = tuple(SampledToken("a", at, -1.0) for at in range(1, length + 1))
    for sizes in [*runs, [length]]:
        start = 0
        for size in sizes:
            piece = tokens[start : start + size]
            if piece and (new := live.take_scored(ScoredPrompt("a", start + 1, piece))) is not None:
                told.append(new)
            start += size
    assert live.scored == told
    assert [token for part in told for token in part.tokens] == [*tokens]
    assert [part.position for part in told] == [part.tokens[0].token_id for part in told]


@given(st.lists(st.tuples(st.floats(1, 512), st.floats(1e-4, 30)), min_size=3), st.floats(1, 2000))
def test_a_deadline_is_never_shorter_than_what_was_seen(seen: list[tuple[float, float]], work: float):
    deadline = IterationDeadline()
    for each, seconds in seen:
        deadline.note(each, seconds)
    assert deadline.limit_s(work) >= max(5.0, 8 * max(seconds for _, seconds in seen))


def batch_of(num_tokens: int, *, position: int) -> IterationBatch:
    builder = BatchBuilder()
    blocks = tuple(range((position + num_tokens) // 16 + 1))
    builder.add("a", (5,) * num_tokens, num_computed_tokens=position, block_table=blocks, sampling=SamplingParams())
    return builder.build()


def test_a_first_iteration_over_a_long_prompt_has_more_than_a_minute():
    """An 8B model reads some 90 tokens a second on two cores: a prompt of 8,000 was killed after 60 s."""
    assert IterationDeadline().limit_s(batch_of(8_000, position=0).work) > 8 * 90
    assert IterationDeadline().limit_s(batch_of(1, position=0).work) == 60


def test_a_chunk_behind_a_kept_context_has_the_time_to_read_it():
    deadline = IterationDeadline()
    for _ in range(3):
        deadline.note(batch_of(512, position=0).work, 1.0)
    assert deadline.limit_s(batch_of(512, position=131_072 - 512).work) > 8 * 30
    assert deadline.limit_s(batch_of(512, position=0).work) == 8
