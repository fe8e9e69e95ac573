"""Answers of ``/v1/responses`` that clients come back to: in memory, the ones not asked for longest leave first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from mlsys_serving.http import HttpError

from mlsys_orca_gateway.streams.journal import AnswerJournal

MAX_NBYTES = 64 * 2**20  # of all that is kept


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One answer."""

    answer: bytes  # JSON, as it was sent
    items: bytes  # JSON: all of the conversation, the answer's own items last; empty: it has not ended
    owner: str = ""  # digest of the API key that asked

    @property
    def nbytes(self) -> int:
        """Memory that it takes, about."""
        return len(self.answer) + len(self.items) + 512


class ResponseStore:
    """Answers by id, of at most so many bytes together. Thread-safe.

    Args:
        max_nbytes: Bytes of all of them.

    Example:
        >>> store = ResponseStore(max_nbytes=1200)
        >>> for name in ("a", "b", "c"):
        ...     store.put(name, StoredResponse(b"{}", b"[]"))
        >>> store.get("c").answer
        b'{}'
        >>> store.delete("a")
        Traceback (most recent call last):
        ...
        mlsys_serving.http.errors.HttpError: there is no response 'a': ...
    """

    def __init__(self, *, max_nbytes: int = MAX_NBYTES) -> None:
        self._max_nbytes = max_nbytes
        self._journal: AnswerJournal | None = None
        self._nbytes = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._lock = threading.Lock()

    def keep_in(self, journal: AnswerJournal) -> None:
        """Take what the journal of the server before has, and write all changes down in it."""
        for response_id, owner, answer, items in journal.responses():
            self.put(response_id, StoredResponse(answer, items, owner))
        self._journal = journal

    async def settled(self) -> None:
        """Wait until the journal, if there is one, has what has changed, or has no room for it."""
        if self._journal is not None:
            await self._journal.settled()

    def _note(self, response_id: str, stored: StoredResponse | None) -> None:
        """Write down an answer that is kept from now on; None: it has left."""
        if self._journal is not None and stored is not None:
            self._journal.put_response(response_id, stored.owner, stored.answer, stored.items)
        elif self._journal is not None:
            self._journal.delete_response(response_id)

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keep an answer; others leave for it. One that is larger than the whole store is not kept."""
        with self._lock:
            before = self._responses.pop(response_id, None)
            self._nbytes -= 0 if before is None else before.nbytes
            if stored.nbytes > self._max_nbytes:
                return
            self._responses[response_id] = stored
            self._nbytes += stored.nbytes
            self._note(response_id, stored)
            while self._nbytes > self._max_nbytes:
                left_id, left = self._responses.popitem(last=False)
                self._nbytes -= left.nbytes
                self._note(left_id, None)

    def get(self, response_id: str, owner: str = "") -> StoredResponse:
        """Return an answer, for the one who asked for it.

        Raises:
            HttpError: 404, there is none of that id.
        """
        with self._lock:
            stored = self._responses.get(response_id)
            if stored is None or stored.owner != owner:
                raise _unknown(response_id)
            self._responses.move_to_end(response_id)
            return stored

    def delete(self, response_id: str, owner: str = "") -> None:
        """Drop an answer, for the one who asked for it.

        Raises:
            HttpError: 404, there is none of that id.
        """
        stored = self.get(response_id, owner)
        with self._lock:
            if self._responses.pop(response_id, None) is not None:
                self._nbytes -= stored.nbytes
                self._note(response_id, None)


def _unknown(response_id: str) -> HttpError:
    return HttpError(
        f"there is no response {response_id[:256]!r}: it was made with 'store' false, deleted, or left for newer ones",
        http_status=404,
        error_code="response_not_found",
        param="previous_response_id",
    )
