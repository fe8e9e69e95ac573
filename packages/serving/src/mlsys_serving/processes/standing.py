"""Children of a supervisor that stand beside its front and workers, and keep something for them."""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlsys_serving.processes.children import Child

_END_S = 5.0


@dataclass(slots=True)
class Standing:
    """A child that keeps something for the workers: forked anew when it dies, and not with a new front."""

    name: str
    run: Callable[[], int | None]
    child: Child | None = None

    def fork(self, closing: Sequence[socket.socket] = ()) -> None:
        """Fork it; in the child the sockets of ``closing`` are closed."""

        def live() -> int | None:
            for end in closing:
                end.close()
            return self.run()

        self.child = Child(self.name, live)

    def end(self) -> None:
        """Ask it to end its own children and itself, and wait; kill it if it does not. Idempotent."""
        child, self.child = self.child, None
        if child is None:
            return
        child.send_signal(signal.SIGTERM)
        poll = select.poll()
        poll.register(child.fd, select.POLLIN)
        if not poll.poll(_END_S * 1e3):
            child.send_signal(signal.SIGKILL)
        child.wait()
