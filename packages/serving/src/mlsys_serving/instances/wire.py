"""Frames between the front and a worker: MessagePack of a kind, fields, and bytes. Nothing is unpickled.

Kinds to a worker: ``start``, ``run``, ``cancel``, ``free``. Kinds to the front: ``ready``, ``part``, ``done``,
``failed``.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Message(msgspec.Struct, array_like=True, frozen=True):
    """One frame's content.

    Example:
        >>> decode(encode(Message("done", {"number": 3}, b"xyz")))
        Message(kind='done', fields={'number': 3}, content=b'xyz')
    """

    kind: str
    fields: dict[str, Any] = {}
    content: bytes = b""


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode
