"""Hub and own node of a server whose model lies on several hosts, as its supervisor has them, and the way to them.

:class:`HostHolders` stands in for :class:`~mlsys_orca.parallel.group.Holders`.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from functools import partial
from typing import Self

from mlsys_core.errors import InvalidInputError, MlsysError, ServingError
from mlsys_serving.processes.children import Standing

from mlsys_orca.parallel.group import Holders, ParallelModel
from mlsys_orca.parallel.holder import Loaded
from mlsys_orca.parallel.hosts import messages
from mlsys_orca.parallel.hosts.assignment import assign
from mlsys_orca.parallel.hosts.group import HostGroup
from mlsys_orca.parallel.hosts.handshake import Listener
from mlsys_orca.parallel.hosts.hub import HubSettings, run_hub
from mlsys_orca.parallel.hosts.identity import identity_of
from mlsys_orca.parallel.hosts.node import run_node
from mlsys_orca.parallel.hosts.settings import HostsSettings
from mlsys_orca.parallel.loading import load_head_only
from mlsys_orca.parallel.messages import Hello
from mlsys_orca.parallel.wiring import GroupShape

_MESSAGE_NBYTES = 1 << 16


def holders_of(model: ParallelModel, *, num_replicas: int = 1, say: Callable[[str], None]) -> Holders | HostHolders:
    """Return the holders of a model's parts, on this host or on several.

    Args:
        model: Its parts.
        num_replicas: Engines that have keys and values of their own.
        say: Called with each line about nodes, in processes of their own.

    Raises:
        InvalidInputError: the nodes do not divide the parts, or the port is in use.
    """
    if model.hosts is None:
        return Holders(model, num_replicas=num_replicas)
    return HostHolders(model, model.hosts, num_replicas=num_replicas, say=say)


class HostHolders:
    """Hub, own node, and the way to them; see :class:`~mlsys_orca.parallel.group.Holders`. A context manager.

    Args:
        model: Its parts.
        hosts: The nodes.
        num_replicas: Engines that have keys and values of their own.
        say: Called with each line about nodes.

    Raises:
        InvalidInputError: the nodes do not divide the parts, or the port is in use.
    """

    def __init__(
        self, model: ParallelModel, hosts: HostsSettings, *, num_replicas: int, say: Callable[[str], None]
    ) -> None:
        degrees = {"tensor_parallel": model.tensor_parallel, "pipeline_parallel": model.pipeline_parallel}
        assignment = assign(**degrees, num_replicas=num_replicas, num_nodes=hosts.num_nodes)
        self.model, self.hosts = model, hosts
        self.loaded: list[Loaded] = []  # by place, after wait()
        self.available_nbytes: int | None = None  # for keys and values of one replica, after wait()
        config = load_head_only(hosts.model, dtype=hosts.dtype).config
        self.identity = identity_of(hosts.model, config, name="server")
        self._listener = Listener(hosts.host, hosts.port, tls=hosts.tls)
        self._asks, asks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._told, tells = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ends = [self._asks, asks, self._told, tells]
        lost = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) if hosts.placer is not None else None
        self._pipe = lost or ()
        settings = HubSettings(
            listener=self._listener,
            secret=hosts.secret,
            identity=self.identity,
            recipe=messages.Recipe(
                **degrees,
                num_replicas=num_replicas,
                dtype=hosts.dtype,
                weights=hosts.weights,
                activations=hosts.activations,
            ),
            assignment=assignment,
            asks=asks,
            report=tells,
            silence_s=hosts.heartbeat_timeout_s,
            join_timeout_s=hosts.join_timeout_s,
            say=say,
            lost=None if lost is None else lost[1],
        )
        self.standing = [Standing("orca hub", lambda: run_hub(settings))]
        if hosts.holds_parts:
            self.standing.append(Standing("orca node", lambda: self._be_node(say)))
        others = hosts.num_nodes - hosts.holds_parts
        host, port = self.address
        if (placer := hosts.placer) is not None and lost is not None:
            keep = partial(placer.keep_nodes, join=self.address, secret=hosts.secret, lost=lost[0])
            self.standing.append(Standing("orca placer", keep))
        elif others:
            say(
                f"waits for {others} node{'s' * (others > 1)}: mlsys orca worker MODEL --join {host}:{port} "
                "--secret-file FILE"
            )

    @property
    def expected(self) -> Hello:
        """Greeting of a rank with the master's code and model."""
        return self.model.expected

    @property
    def address(self) -> tuple[str, int]:
        """Host and port at which nodes join."""
        return self._listener.address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _be_node(self, say: Callable[[str], None]) -> int:
        """Be this machine's node."""
        hosts = self.hosts
        try:
            return run_node(
                hosts.model,
                join=(hosts.host, self.address[1]),
                secret=hosts.secret,
                authority=None if hosts.tls is None else hosts.tls.certificate,
                is_local=True,
                threads=hosts.num_threads,
                say=lambda _: None,
            )
        except MlsysError as error:
            say(f"this machine's node ends: {error}")
            return 1

    def start(self) -> None:
        """Fork the processes and wait for all parts: :meth:`fork`, then :meth:`wait`."""
        self.fork()
        self.wait()

    def fork(self) -> None:
        """Fork hub and node. This process must have a single thread."""
        for each in self.standing:
            each.fork()

    def wait(self) -> None:
        """Wait until all nodes have joined and have their parts.

        Raises:
            InvalidInputError: they do not join in time, or one cannot load its parts.
            ServingError: the hub has ended.
        """
        needed = {each.child.fd: each for each in self.standing if each.child and each.name != "orca node"}
        poll = select.poll()
        for fd in (self._told.fileno(), *needed):
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll()}
        if self._told.fileno() not in ready:
            ended = needed[ready.pop()]
            assert ended.child is not None
            death, ended.child = ended.child.wait(), None
            what = "nodes join" if ended is self.standing[0] else "places nodes"
            raise ServingError(f"the process that {what} has ended: {death}")
        found = messages.decode_start(self._told.recv(_MESSAGE_NBYTES))
        if isinstance(found, messages.NotStarted):
            raise InvalidInputError(found.message)
        self.loaded = [Loaded(part.nbytes, part.is_native, part.dtype, part.needs_logits) for part in found.parts]
        # Each part takes its share of a replica's keys and values; the part with the least room says how many fit.
        least = min(part.available_nbytes for part in found.parts)
        self.available_nbytes = least * len(found.parts)

    def group(self, shape: GroupShape) -> HostGroup:
        """Return a new group, whose ranks come when it is told its replica."""
        return HostGroup(self, shape)

    def ask(self, message: messages.Ask) -> socket.socket:
        """Have the ranks of a group forked; return the group's life socket."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        socket.send_fds(self._asks, [messages.encode(message)], [theirs.fileno()])
        theirs.close()
        return ours

    def close(self) -> None:
        """End hub and node. Idempotent."""
        for each in self.standing:
            each.end()
        for end in self._ends:
            end.close()
        for fd in self._pipe:
            os.close(fd)
        self._pipe = ()
        self._listener.close()
