"""Groups whose ranks are on several hosts, as a master has them.

:class:`HostGroup` stands in for a :class:`~mlsys_orca.parallel.group.Group` on one host. Ranks are forked when the
master is told its replica, since a replica's keys and values are on its nodes.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, Self

import msgspec
from mlsys_core.errors import ServingError
from mlsys_serving.processes import Death

from mlsys_orca.parallel.channels import ControlChannel
from mlsys_orca.parallel.executor import IterationWatch, MasterLinks, ParallelExecutor, greet
from mlsys_orca.parallel.hosts import messages
from mlsys_orca.parallel.hosts.handshake import Listener
from mlsys_orca.parallel.hosts.member import TIMEOUT_S
from mlsys_orca.parallel.hosts.rendezvous import gather
from mlsys_orca.parallel.hosts.results import DistributedResultsIn
from mlsys_orca.parallel.hosts.secrets import Identity
from mlsys_orca.parallel.hosts.settings import HostsSettings
from mlsys_orca.parallel.messages import Done, Hello
from mlsys_orca.parallel.shard import GroupBrokenError
from mlsys_orca.parallel.wiring import GroupShape
from mlsys_orca.scheduling.batch import IterationBatch, IterationOutput

_MESSAGE_NBYTES = 1 << 16
_CAUSE_S = 2.0  # from the end of a rank that lost a neighbour to the word of what that one died of


class WayToHub(Protocol):
    """Part of :class:`~.holders.HostHolders` that a group needs."""

    hosts: HostsSettings
    identity: Identity

    @property
    def expected(self) -> Hello:
        """Greeting of a rank with the master's code and model."""
        ...

    def ask(self, message: messages.Ask) -> socket.socket:
        """Have the ranks of a group forked; return the group's life socket."""
        ...


class HostGroup:
    """Ranks of one master on several hosts; see :class:`~mlsys_orca.parallel.group.Group`. A context manager.

    Args:
        holders: The way to the hub.
        shape: Sizes.
    """

    def __init__(self, holders: WayToHub, shape: GroupShape) -> None:
        self.shape = shape
        self.waits_for = ""  # what is missing, for messages; to be read from any thread
        self._holders = holders
        self._life: socket.socket | None = None
        self._has_met = threading.Event()  # or will not
        self._is_broken = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def executor(
        self, *, watch: IterationWatch | None = None, on_done: Callable[[Done], None] | None = None
    ) -> HostExecutor:
        """Return the executor over the ranks; once."""
        return HostExecutor(self, watch=watch, on_done=on_done)

    def form(self, replica: int) -> tuple[MasterLinks, bool]:
        """Have the ranks of a replica forked and wait for them.

        Returns:
            The master's channels, and whether the ranks can find the largest logits.

        Raises:
            GroupBrokenError: a rank or a node is lost.
            ServingError: a rank does not come in time, or has other code or another model.
        """
        try:
            return self._form(replica)
        except GroupBrokenError:
            self._is_broken = True
            raise
        finally:
            self._has_met.set()

    def _form(self, replica: int) -> tuple[MasterLinks, bool]:
        holders, hosts = self._holders, self._holders.hosts
        name = os.urandom(8).hex()
        listener = Listener(hosts.host, 0, tls=hosts.tls)
        try:
            self._life = holders.ask(messages.Ask(name, replica, self.shape, listener.address[1]))
            self._wait_for_parts(self._life)
            channels, tensors = gather(
                listener,
                hosts.secret,
                msgspec.structs.replace(holders.identity, name="master"),
                self.shape.places,
                group=name,
                life=self._life.fileno(),
                timeout_s=TIMEOUT_S,
            )
        finally:
            listener.close()
        last = 1 + (self.shape.pipeline_parallel - 1) * self.shape.tensor_parallel
        links = MasterLinks(
            down=FanOut(list(channels.values())),
            ups=[(place, channels[place]) for place in self.shape.places],
            results=DistributedResultsIn(
                tensors, ranks=range(last, last + self.shape.tensor_parallel), vocab_size=self.shape.vocab_size
            ),
        )
        hellos = greet(links, holders.expected, timeout_s=TIMEOUT_S)
        return links, not any(hello.needs_logits for hello in hellos)

    def _wait_for_parts(self, life: socket.socket) -> None:
        """Wait until the hub has asked the nodes for their ranks."""
        while True:
            message = self._next(life)
            if isinstance(message, messages.Coming):
                self.waits_for = ""
                return
            if isinstance(message, messages.Waits):
                self.waits_for = message.reason
            else:
                raise GroupBrokenError("a group is lost before it has met" if message is None else message.reason)

    def _next(self, life: socket.socket) -> messages.Waits | messages.Coming | messages.Ended | None:
        """Return the hub's next word; None: the hub is gone."""
        data = b""
        try:
            data = life.recv(_MESSAGE_NBYTES)
        except OSError:
            return None
        if not data:
            return None
        found: messages.Waits | messages.Coming | messages.Ended = messages.decode_life(data)
        return found

    def cause(self, timeout_s: float | None) -> Death | None:
        """Wait for the end of a rank, or of a node, and return it.

        Returns:
            None: none was told within ``timeout_s``, or the hub is gone.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._has_met.wait(timeout_s) or self._life is None or self._is_broken:
            return None
        while True:
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            poll = select.poll()
            poll.register(self._life, select.POLLIN)
            if not poll.poll(None if left_s is None else left_s * 1e3):
                return None
            message = self._next(self._life)
            if message is None:
                return None
            if isinstance(message, messages.Ended):
                if message.exit_code != 0:
                    return Death(message.exit_code, message.signal, message.is_out_of_memory)
                until_s = (
                    until_s or time.monotonic() + _CAUSE_S
                )  # it ended for want of a neighbour, of whom is told soon

    def close(self) -> None:
        """Close the life socket: the ranks are killed. Idempotent."""
        if self._life is not None:
            self._life.close()


class FanOut:
    """One control channel over several: each frame goes to all. It receives nothing."""

    def __init__(self, channels: Sequence[ControlChannel]) -> None:
        self._channels = channels

    def send(self, payload: bytes) -> None:
        """See :class:`~mlsys_orca.parallel.channels.ControlChannel`."""
        for channel in self._channels:
            channel.send(payload)

    def receive(self) -> bytes | None:
        """Return None: nothing comes this way."""
        return None

    def is_waiting(self) -> bool:
        """Return False: nothing comes this way."""
        return False

    def fileno(self) -> int:
        """Return the first channel's descriptor."""
        return self._channels[0].fileno()

    def close(self) -> None:
        """Close all. Idempotent."""
        for channel in self._channels:
            channel.close()


class HostExecutor:
    """Executor of a :class:`HostGroup`: :meth:`serve` has the ranks come, and then it is a :class:`ParallelExecutor`.

    Args:
        group: The group.
        watch: See :class:`ParallelExecutor`.
        on_done: Likewise.
    """

    def __init__(
        self, group: HostGroup, *, watch: IterationWatch | None, on_done: Callable[[Done], None] | None
    ) -> None:
        self.max_in_flight = group.shape.max_in_flight
        self._group, self._watch, self._on_done = group, watch, on_done
        self._executor: ParallelExecutor | None = None

    @property
    def waits_for(self) -> str:
        """Reason why the ranks do not come; empty: there is none."""
        return self._group.waits_for

    def serve(self, replica: int, *, timeout_s: float | None = None) -> str:
        """Have the ranks of a replica come and use its keys and values; see :meth:`ParallelExecutor.serve`.

        Raises:
            GroupBrokenError: a rank or a node is lost.
            ServingError: a rank does not come, or has other code or another model.
        """
        links, finds_largest = self._group.form(replica)
        executor = ParallelExecutor(
            links,
            max_in_flight=self.max_in_flight,
            finds_largest=finds_largest,
            watch=self._watch,
            on_done=self._on_done,
        )
        identity = executor.serve(replica, timeout_s=timeout_s)
        self._executor = executor
        return identity

    def submit(self, batch: IterationBatch) -> None:
        """See :meth:`ParallelExecutor.submit`."""
        self._running().submit(batch)

    def wait(self, timeout_s: float | None) -> tuple[IterationBatch, IterationOutput | BaseException] | None:
        """See :meth:`ParallelExecutor.wait`."""
        return self._running().wait(timeout_s)

    def interrupt(self) -> None:
        """See :meth:`ParallelExecutor.interrupt`."""
        if self._executor is not None:
            self._executor.interrupt()

    def close(self) -> None:
        """See :meth:`ParallelExecutor.close`."""
        if self._executor is not None:
            self._executor.close()

    def _running(self) -> ParallelExecutor:
        if self._executor is None:
            raise ServingError("this executor was told no replica")
        return self._executor
