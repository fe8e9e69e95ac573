"""The journal of answers: what clients asked for and what they got, in a file that survives the server."""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from mlsys_orca.api.resume import records as rec
from mlsys_orca.scheduling.batch import SampledToken, ScoredPrompt
from mlsys_serving.journal import Journal, JournalInUseError, JournalUnavailableError, SyncPolicy, make_folder

_log = logging.getLogger(__name__)
_LOCK_S = 0.5  # to wait for a server that is just ending


class AnswerJournal:
    """Journal of the answers of one server. Used from one event loop.

    Args:
        folder: Of the answers. Each server has a folder in it: the first that is no other's, which may still be ending.
        sync: When the disk has what was written.
        max_nbytes: Size at most.
        reach: Called with the names of steps, for tests.

    Raises:
        InvalidInputError: the folder cannot be used, or holds another version's journal.
    """

    def __init__(
        self,
        folder: Path,
        *,
        sync: SyncPolicy = "interval",
        max_nbytes: int = 1 << 30,
        reach: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.state = rec.State()
        self._pending: list[rec.Record] = []
        self._is_flushing = False
        self._is_failing = False
        make_folder(folder)
        for number in itertools.count():
            try:
                self._journal = Journal(
                    folder / str(number), self._snapshot, sync=sync, max_nbytes=max_nbytes, lock_s=_LOCK_S, reach=reach
                )
                break
            except JournalInUseError:
                continue
        self._folder, self._number = folder, number
        try:
            self._take(self._journal)
            self.adopt()
        except BaseException:
            self._journal.close()
            raise

    def _take(self, journal: Journal) -> None:
        for payload in journal.payloads:
            self.state.apply(rec.decode(payload))
        journal.payloads.clear()

    def adopt(self) -> list[str]:
        """Take over the journals of servers that have ended without one after them; return the keys of their answers.

        Two run at a time while one follows the other.
        """
        before = set(self.state.answers)
        for other in sorted(self._folder.iterdir()):
            if other.name.isdigit() and other.name != str(self._number):
                self._adopt(other)
        return [key for key in self.state.answers if key not in before]

    def _adopt(self, folder: Path) -> None:
        try:
            other = Journal(folder, list, lock_s=0.0)
        except JournalInUseError:
            return
        with other:
            if other.payloads:
                self._journal.append(other.payloads)
                self._take(other)
            shutil.rmtree(folder)

    def _snapshot(self) -> Iterator[bytes]:
        return map(rec.encode, self.state.records())

    async def accept(self, opened: rec.Opened) -> None:
        """Write down a request before its answer is promised.

        Raises:
            JournalUnavailableError: it cannot be written.
        """
        self._write([opened])
        await self._journal.kept()

    async def keep_response(self, response: rec.Response) -> None:
        """Write down an answer of ``/v1/responses``.

        Raises:
            JournalUnavailableError: it cannot be written.
        """
        self._write([response])
        await self._journal.kept()

    def note_item(self, key: str, choice: int, item: SampledToken | ScoredPrompt) -> None:
        """Write down the next item of an answer, at the end of this turn of the event loop."""
        if isinstance(item, ScoredPrompt):
            tokens = tuple((token.token_id, token.logprob, token.top_logprobs) for token in item.tokens)
            self.note(rec.Scored(key, choice, item.position, tokens))
            return
        answer = self.state.answers.get(key)
        if answer is not None:
            token = rec.Token(item.token_id, item.logprob, item.top_logprobs, item.num_cached_tokens)
            self.note(rec.Tokens(key, choice, len(answer.tokens.get(choice, ())), (token,)))

    def note(self, record: rec.Record) -> None:
        """Write down what need not be there at once; where it cannot be, it is tried again with the next."""
        self.state.apply(record)
        self._pending.append(record)
        if not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def close(self) -> None:
        """Write all there is and close the file. Idempotent."""
        self._flush()
        self._journal.close()

    def _flush(self) -> None:
        self._is_flushing = False
        try:
            self._write([])
        except JournalUnavailableError as error:
            if not self._is_failing:
                _log.error("what clients got is not written down: %s", error)
            self._is_failing = True
        else:
            self._is_failing = False

    def _write(self, more: list[rec.Record]) -> None:
        records = [*self._pending, *more]
        if records:
            self._journal.append(map(rec.encode, records))
            self._pending.clear()
            for record in more:
                self.state.apply(record)
