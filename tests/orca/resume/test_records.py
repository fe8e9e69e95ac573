"""The journal of answers: whatever is missing or doubled in it, what it says of an answer is a beginning of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_orca.api.resume import records as rec
from mlsys_orca.api.resume.event_ids import EventId, Numbering, Skip, place_of
from mlsys_orca.api.resume.journal import AnswerJournal
from mlsys_orca.scheduling.batch import SampledToken
from mlsys_serving.http import HttpError
from mlsys_serving.journal import Journal

KEY = "0123456789abcdef" * 2
OPENED = rec.Opened(KEY, "/v1/completions", b"{}", "", 1, 2)


def tokens_of(state: rec.State) -> dict[int, list[int]]:
    known = state.answers[KEY].known() if KEY in state.answers else {}
    return {choice: [token.token_id for token in answer.tokens] for choice, answer in known.items()}


@given(st.lists(st.integers(0, 2), max_size=30), st.data())
def test_records_that_are_lost_or_come_twice_leave_a_beginning(choices: list[int], data: st.DataObject) -> None:
    records: list[rec.Record] = [OPENED]
    answer: dict[int, list[int]] = {}
    for choice in choices:
        given_tokens = answer.setdefault(choice, [])
        records.append(
            rec.Tokens(KEY, choice, len(given_tokens), (rec.Token(len(given_tokens), -0.5, ((1, -2.0),), 0),))
        )
        given_tokens.append(len(given_tokens))
    state = rec.State()
    for record in records:
        for _ in range(data.draw(st.sampled_from([0, 1, 1, 1, 2])) if record is not OPENED else 1):
            state.apply(rec.decode(rec.encode(record)))
    for choice, tokens in tokens_of(state).items():
        assert tokens == answer[choice][: len(tokens)]
    again = rec.State()
    for record in state.records():
        again.apply(record)
    assert list(again.records()) == list(state.records())


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 40), st.randoms(use_true_random=False))
def test_a_stream_in_another_order_goes_on_behind_what_the_client_has(places, num_read, random) -> None:
    numbering = Numbering(KEY)
    ids = [numbering.next_id(place) for place in places]
    num_read = min(num_read, len(places))
    counts = ids[num_read - 1].counts if num_read else ()
    other = places[:]
    random.shuffle(other)
    skip = Skip(counts)
    rest = [place for place in other if not skip.has(place)]
    assert sorted(rest) == sorted(places[num_read:])
    if num_read:
        assert EventId.parse(str(ids[num_read - 1])) == ids[num_read - 1]


@pytest.mark.parametrize(
    "text", ["7", KEY, f"{KEY}:", f"{KEY}:-1", f"{KEY}:1.", f"{KEY.upper()}:1", f"{KEY}:{'1.' * 9999}1"]
)
def test_other_ids_are_refused(text: str) -> None:
    with pytest.raises(HttpError, match="is no id of an event"):
        EventId.parse(text)


@pytest.mark.parametrize(
    ("event", "place"),
    [
        (b"event: x\ndata: {}\n\n", 0),
        (b'data: {"usage":{"choices":[]},"choices":[]}\n\n', 0),
        (b'data: {"id":"data: {","choices":[{"text":"data: {\\"index\\":7}","index":1}]}\n\n', 2),
    ],
)
def test_places(event: bytes, place: int) -> None:
    assert place_of(event) == place


def test_another_versions_journal_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path / "0", list) as journal:
        journal.append([b"\x93\xcc\xff\x01\x02"])
    with pytest.raises(InvalidInputError, match="another version"):
        AnswerJournal(tmp_path)


def test_two_servers_have_a_journal_each_and_the_one_that_stays_takes_all(tmp_path: Path) -> None:
    async def run() -> None:
        first, second = AnswerJournal(tmp_path), AnswerJournal(tmp_path)
        await first.accept(OPENED)
        first.note_item(KEY, 0, SampledToken("", 5))
        assert second.adopt() == []
        first.close()
        assert second.adopt() == [KEY]
        assert tokens_of(second.state) == {0: [5]}
        second.close()
        third = AnswerJournal(tmp_path)
        assert tokens_of(third.state) == {0: [5]}
        third.note(rec.Dropped(KEY))
        third.close()
        fourth = AnswerJournal(tmp_path)
        assert fourth.state.answers == {}
        fourth.close()

    asyncio.run(run())
