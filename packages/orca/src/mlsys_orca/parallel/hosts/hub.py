"""The process that nodes join: it gives them places, has them fork ranks for masters, and notices who is gone.

It stands beside the server's workers. All decisions are those of :class:`~.seats.Seats`; this is their executor.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
from mlsys_core.errors import ServingError

from mlsys_orca.parallel.hosts import messages
from mlsys_orca.parallel.hosts.assignment import Assignment
from mlsys_orca.parallel.hosts.channel import TcpChannel
from mlsys_orca.parallel.hosts.handshake import Listener
from mlsys_orca.parallel.hosts.identity import host_and_seat
from mlsys_orca.parallel.hosts.seats import Seats
from mlsys_orca.parallel.hosts.secrets import Identity
from mlsys_orca.parallel.placement import Placement

_log = logging.getLogger(__name__)
_MESSAGE_NBYTES = 1 << 16
_ACCEPT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings:
    """All that a hub needs; made before the fork."""

    listener: Listener
    secret: bytes
    identity: Identity
    recipe: messages.Recipe
    assignment: Assignment
    asks: socket.socket  # where masters' messages come
    report: socket.socket  # where the outcome of the start goes
    silence_s: float
    join_timeout_s: float
    say: Callable[[str], None]
    lost: int | None = None  # descriptor: seats that lost nodes had wished for are told there, a byte each


@dataclass(slots=True)
class _Node:
    number: int
    channel: TcpChannel
    name: str
    heard_s: float
    wish: int | None  # seat that it asked for


@dataclass(slots=True)
class _Group:
    ask: messages.Ask
    life: socket.socket
    nodes: dict[Placement, int] | None = None  # None: parts are missing
    told: str = ""  # what it waits for, as its master knows
    ended: set[int] = field(default_factory=set)


def run_hub(settings: HubSettings) -> int:
    """Be a hub until SIGTERM; return the exit code."""
    hub = Hub(settings)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        hub.run()
    finally:
        hub.close()
    return 0


class Hub:
    """Connections to nodes and masters. See :func:`run_hub`."""

    def __init__(self, settings: HubSettings) -> None:
        self._settings = settings
        self._seats = Seats(settings.assignment)
        self._nodes: dict[int, _Node] = {}  # by number
        self._by_fd: dict[int, int] = {}  # node by descriptor
        self._groups: dict[int, _Group] = {}  # by descriptor of their life sockets
        self._parts: dict[Placement, messages.PartLoaded] = {}
        self._num_joined = 0
        self._is_started = False
        self._until_s = time.monotonic() + settings.join_timeout_s
        self._said_s = 0.0
        self._joined: queue.SimpleQueue[tuple[Identity, TcpChannel]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        for fd in (self._wake, settings.asks.fileno()):
            self._poll.register(fd, select.POLLIN)

    def run(self) -> None:
        """Follow nodes and masters; does not return."""
        threading.Thread(target=self._accept, name="orca-joins", daemon=True).start()
        beat_s = self._settings.silence_s / 4
        while True:
            now = time.monotonic()
            if now - self._said_s >= beat_s:
                self._said_s = now
                for node in list(self._nodes.values()):
                    self._send(node, messages.Beat())
            for fd, _ in self._poll.poll(beat_s * 1e3):
                self._on_ready(fd)
            for node in list(self._nodes.values()):
                if time.monotonic() - node.heard_s > self._settings.silence_s:
                    self._lose(node, f"was silent for {self._settings.silence_s:.0f} s")
            if not self._is_started and time.monotonic() > self._until_s:
                self._is_started = True  # nobody asks any more
                self._report(messages.NotStarted(self._too_late()))

    def close(self) -> None:
        """Tell all nodes that the server ends."""
        for node in self._nodes.values():
            with suppress(OSError):
                node.channel.send(messages.encode(messages.Leave(None)))
            node.channel.close()

    def _accept(self) -> None:
        """Take nodes as they come; handshakes are slow, so they have a thread."""
        settings = self._settings
        while True:
            began_s = time.monotonic()
            try:
                self._joined.put(settings.listener.accept(settings.secret, settings.identity, timeout_s=_ACCEPT_S))
                os.eventfd_write(self._wake, 1)
            except ServingError as error:
                if time.monotonic() - began_s < _ACCEPT_S:  # else nobody came, which is as it should be
                    settings.say(str(error))
            except OSError:
                return

    def _on_ready(self, fd: int) -> None:
        if fd == self._wake:
            os.eventfd_read(fd)
            while not self._joined.empty():
                self._welcome(*self._joined.get())
        elif fd == self._settings.asks.fileno():
            self._on_ask()
        elif fd in self._groups:
            self._end(fd)  # a master sends nothing there: it is gone
        elif (number := self._by_fd.get(fd)) is not None:
            self._read(self._nodes[number])

    # --- nodes

    def _welcome(self, identity: Identity, channel: TcpChannel) -> None:
        number, self._num_joined = self._num_joined, self._num_joined + 1
        host, wish = host_and_seat(identity.name)
        name = f"{host} ({channel.remote_host})"
        node = self._nodes[number] = _Node(number, channel, name, time.monotonic(), wish)
        self._by_fd[channel.fileno()] = number
        self._poll.register(channel.fileno(), select.POLLIN)
        self._send(node, messages.Welcome(self._settings.silence_s))
        seat = self._seats.join(number, wish)
        if seat is None:
            self._settings.say(f"{name} has joined as a spare node")
        else:
            self._settings.say(f"{name} has joined: {self._seats.num_joined} of {self._seats.num_seats} nodes")
            self._give(number, seat)

    def _give(self, number: int, seat: int) -> None:
        """Tell a node its parts."""
        places = tuple(messages.place_of(place) for place in self._seats.parts(seat))
        self._send(self._nodes[number], messages.Take(self._settings.recipe, places))

    def _read(self, node: _Node) -> None:
        try:
            while node.number in self._nodes and node.channel.is_waiting():
                payload = node.channel.receive()
                if payload is None:
                    self._lose(node, "is gone")
                    return
                node.heard_s = time.monotonic()
                self._follow(node, messages.decode_for_hub(payload))
        except (OSError, ServingError, ValueError) as error:
            self._lose(node, f"is gone: {error}")

    def _follow(self, node: _Node, message: object) -> None:
        match message:
            case messages.PartLoaded():
                place = self._settings.recipe.placement(message.place)
                self._seats.load(node.number, place)
                self._parts[place] = message
                self._look()
            case messages.PartFailed():
                self._settings.say(f"{node.name} cannot load its parts: {message.message}")
                self._start(messages.NotStarted(f"{node.name} cannot load its parts: {message.message}"))
            case messages.RankEnded():
                for group in self._groups.values():
                    if group.ask.group == message.group:
                        self._tell(
                            group,
                            messages.Ended(
                                message.exit_code, message.signal, message.is_out_of_memory, f"a rank on {node.name}"
                            ),
                        )

    def _send(self, node: _Node, message: msgspec.Struct) -> None:
        try:
            node.channel.send(messages.encode(message))
        except OSError:
            self._lose(node, "is gone")

    def _lose(self, node: _Node, why: str) -> None:
        """Forget a node, end the groups that had ranks there, and give its seat to a spare."""
        if self._nodes.pop(node.number, None) is None:
            return
        fd = node.channel.fileno()
        self._poll.unregister(fd)
        del self._by_fd[fd]
        node.channel.close()
        if self._settings.lost is not None and node.wish is not None and node.wish < 256:
            with suppress(OSError):  # nobody reads it now
                os.write(self._settings.lost, bytes([node.wish]))
        found = self._seats.lose(node.number)
        if found is None:
            self._settings.say(f"the spare node {node.name} {why}")
            return
        for group in self._groups.values():
            if group.nodes is not None and node.number in group.nodes.values():
                self._end_ranks(group)
                self._tell(group, messages.Ended(None, int(signal.SIGKILL), False, f"node {node.name} {why}"))
        seat, spare = found
        if spare is None:
            host, port = self._settings.listener.address
            self._settings.say(f"node {node.name} {why}: its parts wait for a node that joins at {host}:{port}")
        else:
            self._settings.say(f"node {node.name} {why}: {self._nodes[spare].name} loads its parts")
            self._give(spare, seat)
        self._look()

    # --- masters

    def _on_ask(self) -> None:
        payload, fds, _, _ = socket.recv_fds(self._settings.asks, _MESSAGE_NBYTES, 1)
        life = socket.socket(fileno=fds[0])
        self._groups[life.fileno()] = _Group(messages.decode_ask(payload), life)
        self._poll.register(life.fileno(), select.POLLIN)
        self._look()

    def _look(self) -> None:
        """Have groups formed whose parts are there, and tell the others what they wait for."""
        if self._seats.lacks() is None:
            places = sorted(self._parts, key=messages.place_of)
            self._start(messages.Started(tuple(self._parts[place] for place in places)))
        for group in list(self._groups.values()):
            if group.nodes is not None:
                continue
            ask = group.ask
            nodes = self._seats.nodes_of(ask.replica)
            if nodes is None:
                reason = self._seats.lacks(ask.replica) or ""
                if reason != group.told:
                    group.told = reason
                    self._tell(group, messages.Waits(reason))
                continue
            group.nodes = nodes
            of_places = tuple(nodes[place] for place in ask.shape.places)
            for number in sorted(set(of_places)):
                self._send(self._nodes[number], messages.Form(ask.group, ask.shape, ask.port, of_places, number))
                if number not in self._nodes:
                    return  # it was lost just now: the group is over
            self._tell(group, messages.Coming())

    def _tell(self, group: _Group, message: msgspec.Struct) -> None:
        with suppress(OSError):  # its master is gone, which the next look finds
            group.life.send(messages.encode(message), socket.MSG_DONTWAIT)

    def _end(self, fd: int) -> None:
        """Forget a group whose master is gone."""
        self._poll.unregister(fd)
        group = self._groups.pop(fd)
        group.life.close()
        self._end_ranks(group)

    def _end_ranks(self, group: _Group) -> None:
        for number in sorted(set((group.nodes or {}).values())):
            if number in self._nodes:
                self._send(self._nodes[number], messages.End(group.ask.group))

    # --- the start

    def _start(self, outcome: messages.Started | messages.NotStarted) -> None:
        if not self._is_started:
            self._is_started = True
            self._report(outcome)

    def _report(self, outcome: messages.Started | messages.NotStarted) -> None:
        with suppress(OSError):  # it is read once, at the start
            self._settings.report.send(messages.encode(outcome), socket.MSG_DONTWAIT)

    def _too_late(self) -> str:
        seats, (host, port) = self._seats, self._settings.listener.address
        within = f"within {self._settings.join_timeout_s:.0f} s"
        if seats.num_joined < seats.num_seats:
            return (
                f"{seats.num_joined} of {seats.num_seats} nodes have joined at {host}:{port} {within}: start "
                f"'mlsys orca worker MODEL --join {host}:{port} --secret-file FILE' on the others"
            )
        return f"not all parts of the model were loaded {within}: {seats.lacks()}"
