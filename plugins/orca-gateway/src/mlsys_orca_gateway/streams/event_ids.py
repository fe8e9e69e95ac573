"""Ids of a stream's events, by which a client that comes back says what it has. Pure.

An id is the answer's key with the events given so far: those that belong to no choice, then those of each choice. The
events of a choice follow from its tokens alone, while the order of several choices is chance: so a stream that is made
again, by another process, is known to go on behind that id whatever its order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec
from mlsys_serving.http import HttpError

_ID = re.compile(r"([0-9a-f]{32}):(\d{1,9}(?:\.\d{1,9}){0,5000})")


class _Choice(msgspec.Struct):
    index: int = 0


class _Data(msgspec.Struct):
    choices: list[_Choice] = []


_decode = msgspec.json.Decoder(_Data).decode


@dataclass(frozen=True, slots=True)
class EventId:
    """Key of an answer, and number of events before and with this one, by place (see :func:`place_of`).

    Example:
        >>> str(EventId("0" * 32, (1, 4)))
        '00000000000000000000000000000000:1.4'
    """

    key: str
    counts: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.key}:{'.'.join(map(str, self.counts))}"

    @classmethod
    def parse(cls, text: str) -> EventId:
        """Return the id that a client gave.

        Raises:
            HttpError: 400, it is none.
        """
        match = _ID.fullmatch(text)
        if match is None:
            raise HttpError(
                f"Last-Event-ID {text[:256]!r} is no id of an event of this server: leave the header out to ask anew",
                http_status=400,
                error_code="invalid_event_id",
            )
        return cls(match[1], tuple(map(int, match[2].split("."))))


def place_of(event: bytes) -> int:
    r"""Return where an event counts: 0 if it belongs to no choice, else one more than its choice's index.

    Example:
        >>> place_of(b'data: {"choices":[{"index":2}]}\n\n'), place_of(b"data: [DONE]\n\n")
        (3, 0)
    """
    start = event.find(b"data: {")
    if start < 0:
        return 0
    choices = _decode(event[start + 6 :]).choices
    return choices[0].index + 1 if choices else 0


class Numbering:
    """Ids of a stream's events in their order.

    Args:
        key: The answer's.

    Example:
        >>> numbering = Numbering("0" * 32)
        >>> [str(numbering.next_id(place))[32:] for place in (0, 1, 1, 0)]
        [':1', ':1.1', ':1.2', ':2.2']
    """

    def __init__(self, key: str) -> None:
        self._key, self._counts = key, [0]

    def next_id(self, place: int) -> EventId:
        """Return the id of the next event, which counts at ``place``."""
        self._counts += [0] * (place + 1 - len(self._counts))
        self._counts[place] += 1
        return EventId(self._key, tuple(self._counts))


class Skip:
    """Tells which events of a stream a client has.

    Args:
        counts: Those that it has, by place.

    Example:
        >>> skip = Skip((1, 1))
        >>> [skip.has(place) for place in (0, 1, 1, 0)]
        [True, True, False, False]
    """

    def __init__(self, counts: tuple[int, ...]) -> None:
        self._left = list(counts)

    def has(self, place: int) -> bool:
        """Return whether the client has the next event, which counts at ``place``."""
        if place < len(self._left) and self._left[place]:
            self._left[place] -= 1
            return True
        return False
