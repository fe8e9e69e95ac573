"""Records of the journal of answers, and the state that they make up. Pure.

Tokens that are missing at the journal's end are made again, and are the same: only what was asked must be in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
from mlsys_core.errors import InvalidInputError
from mlsys_orca.engine.streams import KnownAnswer
from mlsys_orca.scheduling.batch import SampledToken, ScoredPrompt

Logprobs = tuple[tuple[int, float], ...]
MAX_TRIES = 3  # starts of a server at which an answer is taken up without getting on


class Opened(msgspec.Struct, array_like=True, tag=0, frozen=True):
    """A request was accepted."""

    key: str  # the answer's
    path: str  # the route's
    body: bytes  # JSON, as it came
    owner: str  # digest of the API key it came with; empty: the server has none
    created: int  # seconds since the epoch
    seed: int


class Token(msgspec.Struct, array_like=True, frozen=True):
    """One token of an answer."""

    token_id: int
    logprob: float | None
    top_logprobs: Logprobs
    num_cached_tokens: int


class Tokens(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """Tokens of one choice."""

    key: str
    choice: int
    first: int  # index of the first in the answer
    tokens: tuple[Token, ...]


class Scored(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """Log-probabilities of a run of a choice's prompt."""

    key: str
    choice: int
    position: int
    tokens: tuple[tuple[int, float | None, Logprobs], ...]


class Ended(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """An answer is complete; it waits for its client to come back."""

    key: str


class Dropped(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """Nobody will ask for an answer any more."""

    key: str


class TakenUp(msgspec.Struct, array_like=True, tag=5, frozen=True):
    """A server has begun to go on with an answer of the server before it."""

    key: str


class Response(msgspec.Struct, array_like=True, tag=6, frozen=True):
    """An answer of ``/v1/responses`` was kept."""

    id: str
    owner: str
    answer: bytes
    items: bytes


class ResponseDeleted(msgspec.Struct, array_like=True, tag=7, frozen=True):
    """It is kept no longer."""

    id: str


Record = Opened | Tokens | Scored | Ended | Dropped | TakenUp | Response | ResponseDeleted
encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], Record] = msgspec.msgpack.Decoder(Record).decode


def decode(payload: bytes) -> Record:
    """Return a record of the journal.

    Raises:
        InvalidInputError: it is none of this version's.
    """
    try:
        return _decode(payload)
    except msgspec.DecodeError as error:
        raise InvalidInputError(
            f"the journal was written by another version ({error}): give another folder, or that version"
        ) from error


@dataclass(slots=True)
class AnswerState:
    """An answer so far."""

    opened: Opened
    tokens: dict[int, list[Token]] = field(default_factory=dict)  # by choice
    scored: dict[int, list[Scored]] = field(default_factory=dict)  # likewise
    is_ended: bool = False
    num_tries: int = 0  # servers that have taken it up since it last got on

    def known(self) -> dict[int, KnownAnswer]:
        """Return what is known of each choice, as an engine takes it."""
        return {choice: self._known(choice, tokens) for choice, tokens in self.tokens.items()}

    def _known(self, choice: int, tokens: list[Token]) -> KnownAnswer:
        return KnownAnswer(
            tuple(
                SampledToken("", token.token_id, token.logprob, token.top_logprobs, token.num_cached_tokens)
                for token in tokens
            ),
            tuple(
                ScoredPrompt(
                    "", run.position, tuple(SampledToken("", token, logprob, top) for token, logprob, top in run.tokens)
                )
                for run in self.scored.get(choice, ())
            ),
        )

    def records(self) -> Iterator[Record]:
        """Yield records that make up this state."""
        key = self.opened.key
        yield self.opened
        for runs in self.scored.values():
            yield from runs
        for choice, tokens in self.tokens.items():
            yield Tokens(key, choice, 0, tuple(tokens))
        for _ in range(self.num_tries):
            yield TakenUp(key)
        if self.is_ended:
            yield Ended(key)


class State:
    """State that a journal's records make up."""

    def __init__(self) -> None:
        self.answers: dict[str, AnswerState] = {}  # by key
        self.responses: dict[str, Response] = {}  # by id

    def apply(self, record: Record) -> None:
        """Take one record. What belongs to no answer that is open is left out."""
        match record:
            case Opened(key=key):
                self.answers[key] = AnswerState(record)
            case Dropped(key=key):
                self.answers.pop(key, None)
            case Response(id=made):
                self.responses[made] = record
            case ResponseDeleted(id=made):
                self.responses.pop(made, None)
            case Tokens() | Scored() | Ended() | TakenUp():
                if (answer := self.answers.get(record.key)) is not None:
                    _note(answer, record)

    def records(self) -> Iterator[Record]:
        """Yield records that make up this state, fewer than there were."""
        for answer in self.answers.values():
            yield from answer.records()
        yield from self.responses.values()


def _note(answer: AnswerState, record: Tokens | Scored | Ended | TakenUp) -> None:
    match record:
        case Tokens(choice=choice, first=first, tokens=tokens):
            known = answer.tokens.setdefault(choice, [])
            new = tokens[len(known) - first :] if first <= len(known) else ()
            known += new
            if new:
                answer.num_tries = 0
        case Scored(choice=choice):
            answer.scored.setdefault(choice, []).append(record)
        case Ended():
            answer.is_ended = True
        case TakenUp():
            answer.num_tries += 1
