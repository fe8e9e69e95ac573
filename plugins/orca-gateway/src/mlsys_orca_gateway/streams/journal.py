"""The journal of answers: what clients asked for and what they got, in tables that survive the server.

Tokens that are missing at its end are made again, and are the same: only what was asked must be in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from mlsys_orca.engine.streams import KnownAnswer
from mlsys_orca.scheduling.batch import SampledToken, ScoredPrompt

from mlsys_orca_gateway.log import Log, Statement

MAX_TRIES = 3  # starts of a server at which an answer is taken up without getting on
SCHEMA = """
CREATE TABLE answers(key TEXT PRIMARY KEY, opened BLOB NOT NULL, num_tries INTEGER NOT NULL DEFAULT 0);
CREATE TABLE tokens(key TEXT, choice INTEGER, position INTEGER, token BLOB, PRIMARY KEY(key, choice, position))
    WITHOUT ROWID;
CREATE TABLE scored(key TEXT, choice INTEGER, run BLOB);
CREATE TABLE responses(id TEXT PRIMARY KEY, owner TEXT, answer BLOB, items BLOB);
"""
_Logprobs = tuple[tuple[int, float], ...]


class Opened(msgspec.Struct, array_like=True, frozen=True):
    """A request that was accepted."""

    key: str  # the answer's
    path: str  # the route's
    body: bytes  # JSON, as it came
    owner: str  # digest of the API key it came with; empty: the server has none
    created: int  # seconds since the epoch
    seed: int


class _Token(msgspec.Struct, array_like=True, frozen=True):
    token_id: int
    logprob: float | None
    top_logprobs: _Logprobs
    num_cached_tokens: int


class _Run(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of a run of a choice's prompt."""

    position: int
    tokens: tuple[tuple[int, float | None, _Logprobs], ...]


_encode = msgspec.msgpack.Encoder().encode
_opened_of = msgspec.msgpack.Decoder(Opened).decode
_token_of = msgspec.msgpack.Decoder(_Token).decode
_run_of = msgspec.msgpack.Decoder(_Run).decode


@dataclass(frozen=True, slots=True)
class UnfinishedAnswer:
    """An answer of the server before this one."""

    opened: Opened
    num_tries: int  # servers that have taken it up since it last got on
    known: dict[int, KnownAnswer]  # by choice


class AnswerJournal:
    """Answers and responses of one server in its log. Used from one event loop."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._positions: dict[str, dict[int, int]] = {}  # of the next token, by open answer and choice
        self._untried: set[str] = set()  # answers that were taken up and have not got on

    def answers(self) -> list[UnfinishedAnswer]:
        """Return the answers of the server before this one, the oldest first."""
        found = []
        for opened, num_tries in self._log.rows("SELECT opened, num_tries FROM answers ORDER BY rowid"):
            request = _opened_of(opened)
            found.append(UnfinishedAnswer(request, num_tries, self._known(request.key)))
        return found

    def _known(self, key: str) -> dict[int, KnownAnswer]:
        """Return what is known of each choice of an answer, as an engine takes it."""
        tokens: dict[int, list[SampledToken]] = {}
        sql = "SELECT choice, position, token FROM tokens WHERE key = ? ORDER BY choice, position"
        for choice, position, data in self._log.rows(sql, key):
            got = tokens.setdefault(choice, [])
            if position == len(got):  # what follows a gap is made again
                token = _token_of(data)
                got.append(SampledToken("", token.token_id, token.logprob, token.top_logprobs, token.num_cached_tokens))
        scored: dict[int, list[ScoredPrompt]] = {}
        for choice, data in self._log.rows("SELECT choice, run FROM scored WHERE key = ? ORDER BY rowid", key):
            run = _run_of(data)
            parts = tuple(SampledToken("", token, logprob, top) for token, logprob, top in run.tokens)
            scored.setdefault(choice, []).append(ScoredPrompt("", run.position, parts))
        return {choice: KnownAnswer(tuple(got), tuple(scored.get(choice, ()))) for choice, got in tokens.items()}

    async def accept(self, opened: Opened) -> None:
        """Write down a request before its answer is promised.

        Raises:
            LogUnavailableError: it cannot be written.
        """
        self._positions[opened.key] = {}
        await self._log.kept(("INSERT INTO answers(key, opened) VALUES (?, ?)", (opened.key, _encode(opened))))

    def take_up(self, answer: UnfinishedAnswer) -> None:
        """Note that this server goes on with an answer."""
        key = answer.opened.key
        self._positions[key] = {choice: len(known.tokens) for choice, known in answer.known.items()}
        self._untried.add(key)
        self._log.note(("UPDATE answers SET num_tries = num_tries + 1 WHERE key = ?", (key,)))

    def note_item(self, key: str, choice: int, item: SampledToken | ScoredPrompt) -> None:
        """Write down the next item of an answer that is open."""
        if (positions := self._positions.get(key)) is None:
            return
        statements: list[Statement] = []
        if isinstance(item, ScoredPrompt):
            run = _Run(item.position, tuple((each.token_id, each.logprob, each.top_logprobs) for each in item.tokens))
            statements.append(("INSERT INTO scored VALUES (?, ?, ?)", (key, choice, _encode(run))))
        else:
            position = positions.get(choice, 0)
            positions[choice] = position + 1
            token = _Token(item.token_id, item.logprob, item.top_logprobs, item.num_cached_tokens)
            values = (key, choice, position, _encode(token))
            statements.append(("INSERT OR REPLACE INTO tokens VALUES (?, ?, ?, ?)", values))
            if key in self._untried:
                statements.append(self._got_on(key))
        self._log.note(*statements)

    def end(self, key: str) -> None:
        """Note that an answer is complete; it waits for its client to come back."""
        self._positions.pop(key, None)
        if key in self._untried:
            self._log.note(self._got_on(key))

    def drop(self, key: str) -> None:
        """Note that nobody will ask for an answer any more."""
        self._positions.pop(key, None)
        self._untried.discard(key)
        self._log.note(*((f"DELETE FROM {table} WHERE key = ?", (key,)) for table in ("answers", "tokens", "scored")))

    def _got_on(self, key: str) -> Statement:
        self._untried.discard(key)
        return "UPDATE answers SET num_tries = 0 WHERE key = ?", (key,)

    async def settled(self) -> None:
        """Wait until all that was noted before is written, or has found no room."""
        await self._log.kept()

    # --- answers of /v1/responses

    def responses(self) -> list[tuple[str, str, bytes, bytes]]:
        """Return id, owner, answer and items of all that are kept, the oldest first."""
        return self._log.rows("SELECT id, owner, answer, items FROM responses ORDER BY rowid")

    def put_response(self, response_id: str, owner: str, answer: bytes, items: bytes) -> None:
        """Note an answer that is kept."""
        values = (response_id, owner, answer, items)
        self._log.note(("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?)", values))

    def delete_response(self, response_id: str) -> None:
        """Note that an answer is kept no longer."""
        self._log.note(("DELETE FROM responses WHERE id = ?", (response_id,)))
