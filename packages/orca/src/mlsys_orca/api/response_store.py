"""Answers of ``/v1/responses`` that clients come back to: in memory, the ones not asked for longest leave first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from mlsys_core.serving.http import HttpError

MAX_NBYTES = 64 * 2**20  # of all that is kept


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One answer."""

    answer: bytes  # JSON, as it was sent
    items: bytes  # JSON: all of the conversation, the answer's own items last

    @property
    def nbytes(self) -> int:
        """Memory that it takes, about."""
        return len(self.answer) + len(self.items) + 512


class ResponseStore:
    """Answers by id, of at most so many bytes together. Thread-safe.

    Example:
        >>> store = ResponseStore(max_nbytes=1200)
        >>> for name in ("a", "b", "c"):
        ...     store.put(name, StoredResponse(b"{}", b"[]"))
        >>> store.get("c").answer
        b'{}'
        >>> store.delete("a")
        Traceback (most recent call last):
        ...
        mlsys_core.serving.http.errors.HttpError: there is no response 'a': ...
    """

    def __init__(self, *, max_nbytes: int = MAX_NBYTES) -> None:
        self._max_nbytes = max_nbytes
        self._nbytes = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keep an answer; others leave for it. One that is larger than the whole store is not kept."""
        with self._lock:
            if stored.nbytes > self._max_nbytes:
                return
            self._responses[response_id] = stored
            self._nbytes += stored.nbytes
            while self._nbytes > self._max_nbytes:
                self._nbytes -= self._responses.popitem(last=False)[1].nbytes

    def get(self, response_id: str) -> StoredResponse:
        """Return an answer.

        Raises:
            HttpError: 404, there is none of that id.
        """
        with self._lock:
            stored = self._responses.get(response_id)
            if stored is None:
                raise _unknown(response_id)
            self._responses.move_to_end(response_id)
            return stored

    def delete(self, response_id: str) -> None:
        """Drop an answer.

        Raises:
            HttpError: 404, there is none of that id.
        """
        with self._lock:
            stored = self._responses.pop(response_id, None)
            if stored is None:
                raise _unknown(response_id)
            self._nbytes -= stored.nbytes


def _unknown(response_id: str) -> HttpError:
    return HttpError(
        f"there is no response {response_id[:256]!r}: it was made with 'store' false, deleted, or left for newer ones",
        http_status=404,
        error_code="response_not_found",
        param="previous_response_id",
    )
