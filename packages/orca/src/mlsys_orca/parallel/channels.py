"""Channels between the processes of a parallel engine: control and tensors apart (the ORCA paper, section 4.1).

The protocols are the seam between ranks and what carries their messages: sockets and shared memory on one host
(:class:`SocketChannel`, :mod:`mlsys_orca.parallel.tensors.ring`), actor calls and torch.distributed on a Ray cluster. A
rank and a master know no more than these.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mlsys_serving.processes import FrameReader, frame

if TYPE_CHECKING:
    from torch import Tensor

_RECEIVE_NBYTES = 1 << 16


class ControlChannel(Protocol):
    """Frames between two processes, in order; one thread sends, one receives."""

    def send(self, payload: bytes) -> None:
        """Send a frame; it is there as soon as the other end asks.

        Raises:
            OSError: the other end is gone.
        """
        ...

    def receive(self) -> bytes | None:
        """Wait for the next frame and return its payload; None: the other end is gone."""
        ...

    def is_waiting(self) -> bool:
        """Return whether a frame, or the end, can be received without waiting."""
        ...

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when something comes."""
        ...

    def close(self) -> None:
        """Close this end. Idempotent."""
        ...


class StatesOut(Protocol):
    """Way of one stage's states to the next stage. Owner: the controller of the stage."""

    def room(self, number: int, num_tokens: int) -> Tensor:
        """Return fp32 [num_tokens, hidden_size], uninitialised, for the states of iteration ``number``."""
        ...

    def send(self, number: int) -> None:
        """Hand on what was written to the room of iteration ``number``."""
        ...


class StatesIn(Protocol):
    """States of the stage before, for one rank."""

    def receive(self, number: int, num_tokens: int) -> Tensor:
        """Wait for the states of iteration ``number``, fp32 [num_tokens, hidden_size]; iterations come in order.

        Raises:
            GroupBrokenError: they will not come.
        """
        ...


class ResultsOut(Protocol):
    """Way of the results of one rank of the last stage to the master."""

    def logits(self, number: int, num_rows: int) -> Tensor:
        """Return fp32 [num_rows, vocab_size], of which the rank writes its own columns."""
        ...

    def peaks(self, number: int, num_rows: int) -> Tensor:
        """Return float64 [num_rows, 2]: for each row's largest logit among the rank's and where that is."""
        ...

    def send(self, number: int) -> None:
        """Hand on what was written for iteration ``number``; the master reads it when it has the rank's Done."""
        ...


class ResultsIn(Protocol):
    """Results of the last stage, for the master; what it returns is valid until ``max_in_flight`` iterations later."""

    def logits(self, number: int, num_rows: int) -> Tensor:
        """Return the logits of all ranks, fp32 [num_rows, vocab_size]."""
        ...

    def peaks(self, number: int, num_rows: int) -> Tensor:
        """Return the peaks of all ranks, float64 [num_ranks, num_rows, 2]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLinks:
    """Channels of one rank. Owner: the rank."""

    states_in: StatesIn | None  # None: the first stage
    states_out: StatesOut | None  # None: the last stage, or no controller
    results: ResultsOut | None  # None: any stage but the last
    up: ControlChannel | None = None  # to the master; None: messages come in calls, and are answered there
    down: ControlChannel | None = None  # from the master, the controller of the stage before, or that of this stage
    onward: Sequence[ControlChannel] = ()  # of a controller: to its ranks and the next stage's controller


class SocketChannel:
    """Frames over a connected stream socket, which the channel owns."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._frames = end, FrameReader()
        self._received: deque[bytes] = deque()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def send(self, payload: bytes) -> None:
        """See :class:`ControlChannel`."""
        self._socket.sendall(frame(payload))

    def receive(self) -> bytes | None:
        """See :class:`ControlChannel`."""
        while not self._received:
            try:
                data = self._socket.recv(_RECEIVE_NBYTES)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._received.extend(self._frames.feed(data))
        return self._received.popleft()

    def is_waiting(self) -> bool:
        """See :class:`ControlChannel`."""
        return bool(self._received) or bool(self._poll.poll(0))

    def fileno(self) -> int:
        """See :class:`ControlChannel`."""
        return self._socket.fileno()

    def close(self) -> None:
        """See :class:`ControlChannel`."""
        self._socket.close()
