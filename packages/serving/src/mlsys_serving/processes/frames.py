"""Frames on a stream socket between two processes: a length of four bytes, then as many bytes.

What is in a frame is its user's; nothing here, and nothing of our users, is ever unpickled. A frame that its sender did
not finish, because it died, is never delivered.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from mlsys_core.errors import ServingError

_HEADER = struct.Struct("<I")
MAX_FRAME_NBYTES = 1 << 28


def frame(payload: bytes) -> bytes:
    """Return ``payload`` as a frame.

    Raises:
        ServingError: it is larger than :data:`MAX_FRAME_NBYTES`.

    Example:
        >>> list(FrameReader().feed(frame(b"a") + frame(b"bc")))
        [b'a', b'bc']
    """
    if len(payload) > MAX_FRAME_NBYTES:
        raise ServingError(f"{len(payload)} bytes are too many for one frame; at most {MAX_FRAME_NBYTES} may be in it")
    return _HEADER.pack(len(payload)) + payload


class FrameReader:
    """Whole frames out of bytes as they come."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add ``data`` and yield the payloads of the frames that are whole now.

        Raises:
            ServingError: a frame claims to be larger than :data:`MAX_FRAME_NBYTES`.
        """
        self._bytes += data
        start = 0
        try:
            while len(self._bytes) - start >= _HEADER.size:
                (nbytes,) = _HEADER.unpack_from(self._bytes, start)
                if nbytes > MAX_FRAME_NBYTES:
                    raise ServingError(f"a frame claims {nbytes} bytes; at most {MAX_FRAME_NBYTES} may be in it")
                stop = start + _HEADER.size + nbytes
                if len(self._bytes) < stop:
                    break
                payload = bytes(self._bytes[start + _HEADER.size : stop])
                start = stop
                yield payload
        finally:
            del self._bytes[:start]
