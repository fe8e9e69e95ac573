"""A worker's end of its socket to the front."""

from __future__ import annotations

import socket

import pytest
from mlsys_orca.engine.worker import receive


@pytest.mark.parametrize("was_read", [True, False])
def test_a_front_that_has_gone_sends_nothing_more(was_read: bool) -> None:
    front, worker = socket.socketpair()
    with front, worker:
        front.sendall(b"abc")
        assert receive(worker) == b"abc"
        worker.sendall(b"token")  # a front that dies with this unread resets the socket
        if was_read:
            front.recv(16)
        front.close()
        assert receive(worker) == b""
