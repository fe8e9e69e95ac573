"""One end of a socket between two processes, in an event loop: frames out and in, and the other side's death.

A frame is a length of four bytes, then as many bytes. What is in it is its user's; nothing here, and nothing of our
users, is ever unpickled. A frame that its sender did not finish, because it died, is never delivered.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress

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


_log = logging.getLogger(__name__)
_RECEIVE_NBYTES = 1 << 18


class FrameChannel:
    """Connection to another process. Used from one event loop.

    Args:
        end: The socket, which the channel owns.
        loop: The event loop.
        on_frame: Called with each payload.
        on_closed: Called once, when the other process has closed its end: it is dead, or wants no more.
    """

    def __init__(
        self,
        end: socket.socket,
        loop: asyncio.AbstractEventLoop,
        *,
        on_frame: Callable[[bytes], None],
        on_closed: Callable[[], None],
    ) -> None:
        end.setblocking(False)
        self._socket, self._loop = end, loop
        self._on_frame, self._on_closed = on_frame, on_closed
        self._frames, self._unsent = FrameReader(), bytearray()
        self._is_waiting = False  # for room in the socket
        self._is_closed = False
        loop.add_reader(end.fileno(), self.read)

    def send(self, payload: bytes) -> None:
        """Send a frame, as soon as there is room for it."""
        if not self._is_closed:
            self._unsent += frame(payload)
            self._write()

    def read(self) -> None:
        """Take all frames that have come."""
        try:
            while not self._is_closed and (data := self._socket.recv(_RECEIVE_NBYTES)):
                for payload in self._frames.feed(data):
                    self._on_frame(payload)
        except BlockingIOError:
            return
        except OSError:
            _log.debug("the other process has reset its socket")
        if not self._is_closed:
            self.close()
            self._on_closed()

    def close(self) -> None:
        """Close this end. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._socket.fileno())
        if self._is_waiting:
            self._loop.remove_writer(self._socket.fileno())
        self._socket.close()

    def _write(self) -> None:
        is_full = False
        with suppress(OSError):  # it is dead, which reading tells
            try:
                while self._unsent:
                    del self._unsent[: self._socket.send(self._unsent)]
            except BlockingIOError:
                is_full = True
        if self._is_closed:
            return
        if is_full and not self._is_waiting:
            self._loop.add_writer(self._socket.fileno(), self._write)
        elif self._is_waiting and not is_full:
            self._loop.remove_writer(self._socket.fileno())
        self._is_waiting = is_full
