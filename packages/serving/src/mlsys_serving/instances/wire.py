"""Frames between the front and a worker: a kind, fields that JSON can hold, and bytes behind them.

Kinds to a worker: ``start``, ``run``, ``cancel``, ``free``. Kinds to the front: ``ready``, ``part``, ``done``,
``failed``. Nothing is unpickled.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json, to_json

_HEADER = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Message:
    """One frame's content.

    Example:
        >>> Message.decode(Message("done", {"number": 3}, b"xyz").encode())
        Message(kind='done', fields={'number': 3}, content=b'xyz')
    """

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    content: bytes = b""

    def encode(self) -> bytes:
        """Return the frame's payload."""
        header = to_json([self.kind, self.fields])
        return _HEADER.pack(len(header)) + header + self.content

    @classmethod
    def decode(cls, payload: bytes) -> Message:
        """Return the message of a payload."""
        (length,) = _HEADER.unpack_from(payload)
        stop = _HEADER.size + length
        kind, fields = from_json(payload[_HEADER.size : stop])
        return cls(kind, fields, payload[stop:])
