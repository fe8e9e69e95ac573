"""Access: files and batches belong to the key that made them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from mlsys_core.errors import InvalidInputError
from mlsys_serving.http import runtime_of
from mlsys_serving.http.middleware.gate import presented_keys
from starlette.requests import Request

from mlsys_orca.api.batches.disk import Disk

T = TypeVar("T")


class Caller:
    """Client of one request.

    Args:
        request: It has passed the server's gate.
        disk: Has the salt.
    """

    def __init__(self, request: Request, disk: Disk) -> None:
        known = {key.encode() for key in runtime_of(request.app).config.api_keys}
        held = [key for key in presented_keys(request.scope["headers"]) if key in known]
        self._digests = [disk.digest(key) for key in held]
        self._is_anybody = not known

    @property
    def owner(self) -> str | None:
        """Digest that is noted at what the client makes; None: it belongs to all."""
        return self._digests[0] if self._digests else None

    def may_see(self, owner: str | None) -> bool:
        """Return True if something of that owner is this client's too."""
        return self._is_anybody or owner is None or owner in self._digests


def page(items: Sequence[T], *, id_of: Callable[[T], str], after: str | None, limit: int) -> tuple[list[T], bool]:
    """Return the part of a list that a client asks for, and True if more follow.

    Args:
        items: All, in the order asked for.
        id_of: Returns an item's id.
        after: Id of the last item that the client has.
        limit: Items at most.

    Raises:
        InvalidInputError: there is no item ``after``.

    Example:
        >>> page(["a", "b", "c"], id_of=str, after="a", limit=1)
        (['b'], True)
    """
    start = 0
    if after is not None:
        places = [place for place, item in enumerate(items) if id_of(item) == after]
        if not places:
            raise InvalidInputError(f"after: there is no {after[:128]!r} here")
        start = places[0] + 1
    return list(items[start : start + limit]), start + limit < len(items)
