"""Control channel over TCP: frames of bounded size with a code each, plain or within TLS.

A :class:`TcpChannel` is made by :mod:`.handshake` and nowhere else, so both ends of one know the run's secret.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections import deque

from mlsys_core.errors import ServingError
from mlsys_serving.processes import FrameReader, frame

from mlsys_orca.parallel.hosts.secrets import Seal

_RECEIVE_NBYTES = 1 << 16
SILENCE_S = 15  # after which a host that does not acknowledge, or answer the kernel's probes, counts as gone


class TcpChannel:
    """Frames over a connected socket, which the channel owns: :class:`~mlsys_orca.parallel.channels.ControlChannel`.

    One thread may send while another receives. A peer that vanishes without a word is noticed by the kernel within
    :data:`SILENCE_S`, as an error of ``send`` or as the end of ``receive``.

    Args:
        end: Its socket.
        out: Codes of the frames that it sends.
        incoming: Codes of those that it receives.
    """

    def __init__(self, end: socket.socket, out: Seal, incoming: Seal) -> None:
        end.setblocking(False)
        self._socket, self._out, self._in = end, out, incoming
        self._lock = threading.Lock()  # a TLS connection takes one call at a time
        self._frames = FrameReader()
        self._received: deque[bytes] = deque()

    def send(self, payload: bytes) -> None:
        """See :class:`~mlsys_orca.parallel.channels.ControlChannel`."""
        left = memoryview(frame(self._out.close(payload)))
        while left:
            events = select.POLLOUT
            try:
                with self._lock:
                    left = left[self._socket.send(left) :]
                continue
            except (BlockingIOError, ssl.SSLWantWriteError):
                pass
            except ssl.SSLWantReadError:
                events = select.POLLIN
            self._wait(events)

    def receive(self) -> bytes | None:
        """See :class:`~mlsys_orca.parallel.channels.ControlChannel`.

        Raises:
            ServingError: what came is not what the other end sent.
        """
        while not self._received:
            try:
                with self._lock:
                    data = self._socket.recv(_RECEIVE_NBYTES)
            except (BlockingIOError, ssl.SSLWantReadError):
                self._wait(select.POLLIN)
                continue
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT)
                continue
            except OSError:  # also of TLS: the connection ended without a goodbye
                return None
            if not data:
                return None
            for sealed in self._frames.feed(data):
                payload = self._in.open(sealed)
                if payload is None:
                    raise ServingError("a frame came over the network that the other host did not send")
                self._received.append(payload)
        return self._received.popleft()

    def is_waiting(self) -> bool:
        """See :class:`~mlsys_orca.parallel.channels.ControlChannel`."""
        if self._received or (isinstance(self._socket, ssl.SSLSocket) and self._socket.pending()):
            return True
        return self._wait(select.POLLIN, 0)

    def fileno(self) -> int:
        """See :class:`~mlsys_orca.parallel.channels.ControlChannel`."""
        return self._socket.fileno()

    @property
    def local_host(self) -> str:
        """Address of this machine that the connection uses."""
        return str(self._socket.getsockname()[0])

    @property
    def remote_host(self) -> str:
        """Address of the other machine."""
        return str(self._socket.getpeername()[0])

    def close(self) -> None:
        """See :class:`~mlsys_orca.parallel.channels.ControlChannel`."""
        self._socket.close()

    def _wait(self, events: int, timeout_ms: int | None = None) -> bool:
        poll = select.poll()
        poll.register(self._socket, events)
        return bool(poll.poll(timeout_ms))


def prepare(end: socket.socket) -> None:
    """Set a connected TCP socket up: no delay of small frames, and a bound on silence."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 3)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 3)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
