"""Writing of a response's head together with the first of its body: uvicorn writes them apart, a system call each."""

from __future__ import annotations

import asyncio


class JoinedWrites:
    """The transport of one response, as uvicorn's cycle uses it: the first write waits for the second.

    After an interim ``100 Continue``, which is a first write too, head and body go apart.

    If there is none within the same turn of the event loop (a stream whose first part takes time), the head goes alone.

    Args:
        transport: of the connection.
        loop: its event loop.

    Example:
        >>> class Transport:
        ...     def writelines(self, parts): print(b"".join(parts))
        >>> async def main():
        ...     response = JoinedWrites(Transport(), asyncio.get_running_loop())
        ...     response.write(b"head,")
        ...     response.write(b"body")
        >>> asyncio.run(main())
        b'head,body'
    """

    __slots__ = ("_has_begun", "_head", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._has_begun = False
        self._head: bytes | None = None  # written, and not yet given to the transport

    def write(self, data: bytes) -> None:
        """Write a part of the response."""
        if not self._has_begun:
            self._has_begun, self._head = True, data
            self._loop.call_soon(self._flush)
        elif self._head is None:
            self._transport.write(data)
        else:
            head, self._head = self._head, None
            self._transport.writelines([head, data])

    def is_closing(self) -> bool:
        """Return whether the transport is closed, or about to be."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the transport when all has been written."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            if not self._transport.is_closing():
                self._transport.write(head)
