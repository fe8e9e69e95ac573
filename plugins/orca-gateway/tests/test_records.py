"""The journal of answers: whatever is missing or doubled in it, what it says of an answer is a beginning of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_orca.scheduling.batch import SampledToken, ScoredPrompt
from mlsys_orca_gateway.log import Log
from mlsys_orca_gateway.streams.event_ids import EventId, Numbering, Skip, place_of
from mlsys_orca_gateway.streams.journal import SCHEMA, AnswerJournal, Opened
from mlsys_serving.http import HttpError

KEY = "0123456789abcdef" * 2
OPENED = Opened(KEY, "/v1/completions", b"{}", "", 1, 2)


def tokens_of(journal: AnswerJournal) -> dict[int, list[int]]:
    known = {answer.opened.key: answer.known for answer in journal.answers()}.get(KEY, {})
    return {choice: [token.token_id for token in answer.tokens] for choice, answer in known.items()}


@given(st.lists(st.integers(0, 2), max_size=30), st.data())
def test_tokens_that_are_lost_leave_a_beginning(
    tmp_path_factory: pytest.TempPathFactory, choices: list[int], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("journal") / "log"
    answer: dict[int, list[int]] = {}

    async def write() -> None:
        with Log(path, SCHEMA, sync="never") as log:
            journal = AnswerJournal(log)
            await journal.accept(OPENED)
            for choice in choices:
                given_tokens = answer.setdefault(choice, [])
                journal.note_item(KEY, choice, SampledToken("", len(given_tokens), -0.5, ((1, -2.0),), 0))
                given_tokens.append(len(given_tokens))

    asyncio.run(write())
    with Log(path, SCHEMA, sync="never") as log:
        assert tokens_of(AnswerJournal(log)) == answer
        for choice, tokens in answer.items():
            for position in range(len(tokens)):
                if data.draw(st.sampled_from([True, False, False, False])):
                    log.note(("DELETE FROM tokens WHERE choice = ? AND position = ?", (choice, position)))
        for choice, found in tokens_of(AnswerJournal(log)).items():
            assert found == answer[choice][: len(found)]


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


def test_the_next_server_has_what_was_open_and_how_often_it_was_tried(tmp_path: Path) -> None:
    async def run() -> None:
        with Log(tmp_path / "log", SCHEMA) as log:
            first = AnswerJournal(log)
            await first.accept(OPENED)
            first.note_item(KEY, 0, SampledToken("", 5))
            first.note_item(KEY, 0, ScoredPrompt("", 1, (SampledToken("", 4, -1.5, ((2, -0.5),)),)))
        with Log(tmp_path / "log", SCHEMA) as log:
            second = AnswerJournal(log)
            (answer,) = second.answers()
            assert (answer.opened, answer.num_tries) == (OPENED, 0)
            assert answer.known[0].scored == (ScoredPrompt("", 1, (SampledToken("", 4, -1.5, ((2, -0.5),)),)),)
            second.take_up(answer)
            assert second.answers()[0].num_tries == 1
            second.note_item(KEY, 0, SampledToken("", 6))  # it gets on
            assert second.answers()[0].num_tries == 0
            assert tokens_of(second) == {0: [5, 6]}
            second.drop(KEY)
            second.note_item(KEY, 0, SampledToken("", 7))
        with Log(tmp_path / "log", SCHEMA) as log:
            assert AnswerJournal(log).answers() == []
            assert [log.rows(f"SELECT * FROM {table}") for table in ("tokens", "scored")] == [[], []]

    asyncio.run(run())
