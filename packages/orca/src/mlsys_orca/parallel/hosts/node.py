"""One machine of several that hold a model: joins the server's hub, loads the parts it is told, forks ranks.

:func:`run_node` is all of ``mlsys orca worker``, and what any other launcher starts. The process has one thread, since
it forks; it computes nothing.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mlsys_core.errors import ServingError

from mlsys_orca.parallel.hosts.channel import TcpChannel
from mlsys_orca.parallel.hosts.identity import identity_of, node_name
from mlsys_orca.parallel.hosts.node_life import Ending, NodeLife
from mlsys_orca.parallel.hosts.rendezvous import Joining
from mlsys_orca.parallel.hosts.secrets import Identity
from mlsys_orca.parallel.loading import load_head_only

_log = logging.getLogger(__name__)
_RETRY_S = 0.5  # between two tries to join
_PATIENCE_S = 2.0  # with a server that was lost: it may have lost this node alone
_HANDSHAKE_S = 10.0


def run_node(
    model: str | Path,
    *,
    join: tuple[str, int],
    secret: bytes,
    authority: Path | None = None,
    is_local: bool = False,
    threads: int = 0,
    timeout_s: float = 60.0,
    seat: int | None = None,
    say: Callable[[str], None] = _log.info,
) -> int:
    """Hold parts of a model for a server until that ends; return the exit code.

    The process must have a single thread. SIGINT and SIGTERM end it, if this is its main thread. When the server is
    lost the node tries to join it again, and ends with an error if nobody is there.

    Args:
        model: A name, a GGUF file or a directory: this machine's own copy.
        join: Host and port at which the server listens (``mlsys orca serve --nodes N --listen HOST:PORT``).
        secret: The run's, as :func:`~.secrets.read_secret` returns it.
        authority: PEM file with the authority of the server's certificate, if it has one (``--tls-certificate``).
        is_local: The server is on this machine, and ``authority`` is its certificate.
        threads: Threads of each rank; 0: the cores this process may use, divided over its parts.
        timeout_s: Seconds to keep trying while nobody listens there.
        seat: Number of the seat that it would have, if that is free; None: any.
        say: Called with each line about the node's state.

    Raises:
        InvalidInputError: there is no such model, or a part of it cannot be loaded here.
        ServingError: nobody listens there, it has another secret, other code or another model, or it is lost.
    """
    import torch
    from mlsys_core.config import settings
    from mlsys_core.models import resolve_model

    torch.set_num_threads(1)  # threads do not survive the fork of the processes to come
    path = resolve_model(str(model), settings().cache_dir)
    loaded = load_head_only(path)
    identity = identity_of(path, loaded.config, name=node_name(socket.gethostname(), seat))
    joining = Joining(host=join[0], secret=secret, authority=authority, is_local=is_local)
    with _ending() as ending:
        patience_s, was_lost = timeout_s, False
        while True:
            channel = _join(
                joining, join[1], identity, patience_s=patience_s, was_lost=was_lost, is_ending=ending.is_set
            )
            if channel is None:
                return 0
            say(f"joined the server at {join[0]}:{join[1]}")
            node = NodeLife(path, channel, joining, identity, threads=threads, say=say)
            try:
                if node.run(ending):
                    return 0
            finally:
                node.close()
            say(f"lost the server at {join[0]}:{join[1]}")
            patience_s, was_lost = _PATIENCE_S, True


@contextmanager
def _ending() -> Iterator[Ending]:
    ending, numbers = Ending(), (signal.SIGINT, signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, ending.set) for number in numbers if is_main}
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(ending.fd)


def _join(
    joining: Joining, port: int, ours: Identity, *, patience_s: float, was_lost: bool, is_ending: Callable[[], bool]
) -> TcpChannel | None:
    """Join the server, again and again while nobody listens; None: a signal came.

    Args:
        joining: How.
        port: At which it listens.
        ours: This node's claims.
        patience_s: Seconds to try.
        was_lost: The node was joined to it before: whatever is in the way may be the server's own end.
        is_ending: Returns whether a signal came.

    Raises:
        ServingError: nobody listens, or the server refuses this node.
    """
    until_s = time.monotonic() + patience_s
    while not is_ending():
        try:
            return joining.join(port, ours, timeout_s=_HANDSHAKE_S)
        except ServingError as error:
            is_refused = isinstance(error.__cause__, OSError) and "nobody can be joined" in str(error)
            if time.monotonic() < until_s and (is_refused or was_lost):
                time.sleep(_RETRY_S)
                continue
            if was_lost:
                raise ServingError(f"the server at {joining.host}:{port} is lost: {error}") from error
            raise
    return None
