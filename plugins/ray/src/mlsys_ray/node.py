"""The process that an actor starts for its seat: it forks the node, and ends it when the actor is gone.

The order comes as the first line of its standard input, secret and all, and goes to no file. The input stays open while
the actor lives: its end is the actor's.
"""

from __future__ import annotations

import select
import signal
import sys

import msgspec
from mlsys_core.errors import MlsysError
from mlsys_serving.processes.children import Child

_END_S = 5.0


class NodeOrder(msgspec.Struct, frozen=True, kw_only=True):
    """All that a node needs to join its server."""

    model: str
    host: str  # of the server
    port: int
    secret: bytes
    seat: int  # that it asks for
    num_threads: int  # of each rank


def main() -> int:
    """Be the node's parent; return its exit code."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=NodeOrder)
    child = Child("orca ray node", lambda: _be_node(order))
    signal.signal(signal.SIGTERM, lambda *_: child.send_signal(signal.SIGTERM))
    poll = select.poll()
    poll.register(sys.stdin, select.POLLIN)
    poll.register(child.fd, select.POLLIN)
    if child.fd not in {fd for fd, _ in poll.poll()}:  # the actor is gone
        child.send_signal(signal.SIGTERM)
        poll.unregister(sys.stdin)
        if not poll.poll(_END_S * 1e3):
            child.send_signal(signal.SIGKILL)
    death = child.wait()
    return 128 + (death.signal or 0) if death.exit_code is None else death.exit_code


def _be_node(order: NodeOrder) -> int:
    from mlsys_orca.parallel.hosts.node import run_node

    try:
        return run_node(
            order.model,
            join=(order.host, order.port),
            secret=order.secret,
            threads=order.num_threads,
            seat=order.seat,
            say=lambda line: print(f"mlsys: {line}", file=sys.stderr, flush=True),
        )
    except MlsysError as error:
        print(error, flush=True)  # which the actor reads
        return 1


if __name__ == "__main__":
    sys.exit(main())
