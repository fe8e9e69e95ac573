"""Rendezvous of a group on several hosts: ranks join the master's port, and all find each other for tensors.

Over each rank's channel go first the entries of torch.distributed's store, which the master passes on, then a word from
each side that it is connected, then the messages of :mod:`mlsys_orca.parallel.messages`.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlsys_core.errors import ServingError

from mlsys_orca.parallel.channels import ControlChannel
from mlsys_orca.parallel.hosts.channel import TcpChannel
from mlsys_orca.parallel.hosts.handshake import Listener, join
from mlsys_orca.parallel.hosts.messages import Met, Put, decode_meeting, encode
from mlsys_orca.parallel.hosts.secrets import Identity
from mlsys_orca.parallel.hosts.tensors import PutStore, TensorGroup
from mlsys_orca.parallel.placement import Placement
from mlsys_orca.parallel.shard import GroupBrokenError


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """Address and secret with which nodes, and their ranks, join a server."""

    host: str
    secret: bytes
    authority: Path | None = None  # of the server's certificate; None: there is no TLS
    is_local: bool = False  # the server is on this machine

    def join(self, port: int, ours: Identity, *, timeout_s: float) -> TcpChannel:
        """Join a listener of the server; see :func:`~.handshake.join`."""
        _, channel = join(
            self.host,
            port,
            self.secret,
            ours,
            authority=self.authority,
            is_local=self.is_local,
            timeout_s=timeout_s,
        )
        return channel


def name_of(group: str, place: Placement) -> str:
    """Return the name that a rank of a group gives when it joins."""
    return f"{group} {place.stage}.{place.rank}"


class _Connecting:
    """The making of this process's :class:`TensorGroup`, in a thread: it waits for entries that come meanwhile."""

    def __init__(
        self, tell: Callable[[str, bytes], None], number: int, size: int, *, address: str, timeout_s: float
    ) -> None:
        self.store = PutStore(tell, timeout_s=timeout_s)
        self.fd = os.eventfd(0, os.EFD_CLOEXEC)  # readable when it is made, or cannot be
        self._arguments = number, size, address
        self._found: TensorGroup | BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="orca-connecting", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number, size, address = self._arguments
        try:
            self._found = TensorGroup(self.store, number, size, address=address)
        except BaseException as error:  # noqa: BLE001 - raised where it is taken
            self._found = error
        os.eventfd_write(self.fd, 1)

    def take(self) -> TensorGroup:
        """Return the group, when :attr:`fd` is readable."""
        self._thread.join()
        if isinstance(self._found, TensorGroup):
            return self._found
        raise GroupBrokenError(f"the group's processes cannot reach each other: {self._found}") from self._found

    def close(self) -> None:
        """Close the descriptor, once the thread has ended."""
        if not self._thread.is_alive():
            os.close(self.fd)


def gather(
    listener: Listener,
    secret: bytes,
    ours: Identity,
    places: list[Placement],
    *,
    group: str,
    life: int,
    timeout_s: float,
) -> tuple[dict[Placement, TcpChannel], TensorGroup]:
    """Do the master's part: wait for all ranks, and return their channels and the way of tensors.

    Args:
        listener: That they join.
        secret: The run's.
        ours: The master's claims.
        places: Of the ranks.
        group: The group's name.
        life: A descriptor that becomes readable when the group is lost before it has met.
        timeout_s: For all of it.

    Raises:
        GroupBrokenError: the group is lost.
        ServingError: a rank does not come in time, or has other code or another model.
    """
    until_s = time.monotonic() + timeout_s
    channels: dict[Placement, TcpChannel] = {}
    try:
        awaited = {name_of(group, place): place for place in places}
        while awaited:
            if listener.fileno() not in _wait([listener.fileno(), life], until_s):
                missing = " and ".join(f"rank {place.rank} of stage {place.stage}" for place in awaited.values())
                raise _late(missing, until_s, timeout_s)
            theirs, channel = listener.accept(secret, ours, timeout_s=max(0.1, until_s - time.monotonic()))
            place = awaited.pop(theirs.name, None)
            if place is None:
                channel.close()  # of a group before
            else:
                channels[place] = channel
        return channels, _connect_all(channels, life, until_s, timeout_s)
    except BaseException:
        for channel in channels.values():
            channel.close()
        raise


def _connect_all(channels: dict[Placement, TcpChannel], life: int, until_s: float, timeout_s: float) -> TensorGroup:
    """Pass entries of the store on until the master and all ranks are connected."""
    ranks, sending = list(channels.values()), threading.Lock()

    def tell(key: str, value: bytes, origin: TcpChannel | None = None) -> None:
        with sending:
            for rank in ranks:
                if rank is not origin:
                    rank.send(encode(Put(key, value)))

    own = _Connecting(tell, 0, len(ranks) + 1, address=ranks[0].local_host, timeout_s=timeout_s)
    unmet, by_fd = set(ranks), {rank.fileno(): rank for rank in ranks}
    try:
        tensors: TensorGroup | None = None
        while unmet or tensors is None:
            watched = [rank.fileno() for rank in unmet] + ([own.fd] if tensors is None else [])
            for fd in _wait([*watched, life], until_s):
                if fd == life:
                    raise GroupBrokenError("the group is lost before it has met")
                if fd == own.fd:
                    tensors = own.take()
                    continue
                rank = by_fd[fd]
                message = _next(rank)
                if isinstance(message, Met):
                    unmet.discard(rank)
                else:
                    own.store.put(message.key, message.value)
                    tell(message.key, message.value, rank)
            if time.monotonic() > until_s:
                raise _late("a rank", until_s, timeout_s)
        for rank in ranks:
            rank.send(encode(Met()))
        return tensors
    except OSError as error:
        raise GroupBrokenError(f"a rank is gone: {error}") from error
    finally:
        own.close()


def meet(
    joining: Joining, port: int, ours: Identity, *, number: int, size: int, timeout_s: float
) -> tuple[TcpChannel, TensorGroup]:
    """Do a rank's part: join the master, and return its channel and the way of tensors.

    Args:
        joining: To the server.
        port: Of the master.
        ours: The rank's claims, with its name.
        number: Of the rank in the group.
        size: Processes of the group.
        timeout_s: For all of it.

    Raises:
        GroupBrokenError: the group is lost.
        ServingError: nobody listens, or the master has other code or another model.
    """
    until_s = time.monotonic() + timeout_s
    channel = joining.join(port, ours, timeout_s=timeout_s)

    def tell(key: str, value: bytes) -> None:
        channel.send(encode(Put(key, value)))

    own = _Connecting(tell, number, size, address=channel.local_host, timeout_s=timeout_s)
    try:
        tensors: TensorGroup | None = None
        while True:
            ready = _wait([channel.fileno(), *([own.fd] if tensors is None else [])], until_s)
            if not ready:
                raise _late("another rank", until_s, timeout_s)
            if own.fd in ready and tensors is None:
                tensors = own.take()
                channel.send(encode(Met()))
            while channel.is_waiting():
                message = _next(channel)
                if isinstance(message, Met):
                    assert tensors is not None, "the master has heard of it"
                    return channel, tensors
                own.store.put(message.key, message.value)
    except OSError as error:
        raise GroupBrokenError(f"the master is gone: {error}") from error
    finally:
        own.close()


def _next(channel: ControlChannel) -> Put | Met:
    payload = channel.receive()
    if payload is None:
        raise GroupBrokenError("a process of the group is gone before it has met")
    message: Put | Met = decode_meeting(payload)
    return message


def _wait(fds: list[int], until_s: float) -> list[int]:
    """Return the descriptors that are readable, as soon as one is; none, when it is too late."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(0.0, until_s - time.monotonic()) * 1e3)]


def _late(what: str, until_s: float, timeout_s: float) -> ServingError:
    if time.monotonic() < until_s:
        return GroupBrokenError("the group is lost before it has met")
    return ServingError(f"{what} did not come within {timeout_s:.0f} s")
