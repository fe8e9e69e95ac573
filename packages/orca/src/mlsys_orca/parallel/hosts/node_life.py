"""A node from joining to the loss of its server: parts are loaded and ranks forked as the hub says."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from mlsys_core.device import get_device
from mlsys_core.errors import InvalidInputError, MlsysError, ServingError
from mlsys_serving.processes import RestartBudget, is_stopped
from mlsys_serving.processes.children import Standing

from mlsys_orca.parallel.group import Holders, ParallelModel
from mlsys_orca.parallel.holder import Ask, Born, Failed, ask, decode_report, decode_told
from mlsys_orca.parallel.hosts import messages
from mlsys_orca.parallel.hosts.channel import TcpChannel
from mlsys_orca.parallel.hosts.member import MemberWires
from mlsys_orca.parallel.hosts.rendezvous import Joining
from mlsys_orca.parallel.hosts.secrets import Identity
from mlsys_orca.parallel.parts import divide
from mlsys_orca.parallel.placement import Placement

_MESSAGE_NBYTES = 4096


class Ending:
    """A wish to end, which a signal may bring."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC)  # readable from then on
        self._is_set = False

    def is_set(self) -> bool:
        """Return whether the end is wanted."""
        return self._is_set

    def set(self, *_: object) -> None:
        """Want the end; also as a signal's handler."""
        self._is_set = True
        os.eventfd_write(self.fd, 1)


@dataclass(slots=True)
class _Rank:
    group: str
    life: socket.socket
    pid: int | None = None  # None: not known yet
    was_stopped: bool = False  # by a signal, at the last look


class NodeLife:
    """A node from joining to the loss of its server.

    Args:
        path: The model.
        channel: To the hub; owned.
        joining: How ranks join.
        identity: The node's.
        threads: Of each rank; 0: cores divided.
        say: Called with lines about its state.
    """

    def __init__(
        self,
        path: Path,
        channel: TcpChannel,
        joining: Joining,
        identity: Identity,
        *,
        threads: int,
        say: Callable[[str], None],
    ) -> None:
        self._path, self._channel, self._joining, self._identity = path, channel, joining, identity
        self._threads, self._say = threads, say
        self._recipe: messages.Recipe | None = None
        self._model: ParallelModel | None = None
        self._holders: Holders | None = None
        self._num_told = 0  # parts that the hub knows
        self._ranks: dict[int, _Rank] = {}  # by descriptor of their life sockets
        self._reports: dict[int, Placement] = {}  # by descriptor
        self._standing: dict[int, Standing] = {}  # by descriptor of the child
        self._budget = RestartBudget()
        self._silence_s, self._heard_s, self._said_s = 60.0, time.monotonic(), 0.0
        self._has_left = False
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)

    def run(self, ending: Ending) -> bool:
        """Follow the hub; return True if the end was wanted, False if the server is lost.

        Raises:
            InvalidInputError: a part cannot be loaded.
            ServingError: the hub does not want this node, or holders die again and again.
        """
        self._poll.register(ending.fd, select.POLLIN)
        try:
            while not self._has_left and not ending.is_set():
                now = time.monotonic()
                if now - self._said_s >= self._silence_s / 4:
                    self._send(messages.Beat())
                    self._said_s = now
                    self._look()
                if now - self._heard_s > self._silence_s:
                    return False
                for fd, _ in self._poll.poll(self._silence_s / 4 * 1e3):
                    self._on_ready(fd)
        except (OSError, ConnectionError):
            return False
        return True

    def close(self) -> None:
        """End holders and ranks, and the connection. Idempotent."""
        for rank in self._ranks.values():
            rank.life.close()
        self._ranks.clear()
        if self._holders is not None:
            self._holders.close()
        self._channel.close()

    def _send(self, message: msgspec.Struct) -> None:
        self._channel.send(messages.encode(message))

    def _on_ready(self, fd: int) -> None:
        if fd == self._channel.fileno():
            while not self._has_left and self._channel.is_waiting():
                payload = self._channel.receive()
                if payload is None:
                    raise ConnectionError
                self._heard_s = time.monotonic()
                self._follow(messages.decode_for_node(payload))
        elif fd in self._ranks:
            self._on_rank(fd)
        elif fd in self._reports:
            self._on_report(self._reports[fd])
        elif fd in self._standing:
            self._on_holder_death(fd)

    def _follow(self, message: object) -> None:
        match message:
            case messages.Welcome():
                self._silence_s = message.silence_s
                self._say("waits for parts of the model")
            case messages.Take():
                self._take(message)
            case messages.Form():
                self._form(message)
            case messages.End():
                for fd in [fd for fd, rank in self._ranks.items() if rank.group == message.group]:
                    self._forget(fd)
            case messages.Leave():
                if message.error is not None:
                    raise ServingError(f"the server does not want this node: {message.error}")
                self._has_left = True
                self._say("the server has ended")

    # --- parts

    def _take(self, message: messages.Take) -> None:
        """Fork holders that load this node's parts."""
        recipe = self._recipe = message.recipe
        places = [recipe.placement(place) for place in message.places]
        parts = recipe.tensor_parallel * recipe.pipeline_parallel
        try:
            _, self._model = divide(
                self._path,
                tensor_parallel=recipe.tensor_parallel,
                pipeline_parallel=recipe.pipeline_parallel,
                dtype=recipe.dtype,
                weights=recipe.weights,  # type: ignore[arg-type]  # checked by the hub
                activations=recipe.activations,  # type: ignore[arg-type]  # likewise
                share=len(places) / parts,
            )
        except MlsysError as error:
            self._fail(str(error))
        assert self._model is not None
        self._holders = Holders(self._model, num_replicas=recipe.num_replicas, places=places)
        self._say(f"loads {len(places)} of {parts} parts: {', '.join(f'{p.stage}.{p.rank}' for p in places)}")
        for place, told in self._holders.reports.items():
            self._reports[told.fileno()] = place
            self._poll.register(told, select.POLLIN)
        for each in self._holders.standing:
            self._fork(each)

    def _fork(self, holder: Standing) -> None:
        holder.fork([self._channel, *(rank.life for rank in self._ranks.values())])  # type: ignore[list-item]
        assert holder.child is not None
        self._standing[holder.child.fd] = holder
        self._poll.register(holder.child.fd, select.POLLIN)

    def _on_report(self, place: Placement) -> None:
        assert self._holders is not None
        report = decode_report(self._holders.reports[place].recv(_MESSAGE_NBYTES))
        if isinstance(report, Failed):
            self._fail(report.message)
            return
        available = get_device("cpu").memory_info().available_nbytes // len(self._holders.reports)
        self._send(
            messages.PartLoaded(
                messages.place_of(place),
                report.nbytes,
                report.is_native,
                report.dtype,
                report.needs_logits,
                available,
            )
        )
        self._num_told += 1
        if self._num_told == len(self._holders.reports):
            self._say("has all its parts")

    def _fail(self, reason: str) -> None:
        with suppress(OSError):
            self._send(messages.PartFailed(reason))
        raise InvalidInputError(reason)

    def _on_holder_death(self, fd: int) -> None:
        """Fork a holder anew: the keys and values of its part are still there."""
        self._poll.unregister(fd)
        holder = self._standing.pop(fd)
        assert holder.child is not None
        child, holder.child = holder.child, None
        death = child.wait()
        delay_s = self._budget.delay_s(time.monotonic())
        if delay_s is None:
            raise ServingError(f"the process of part {holder.name} ends again and again ({death}): this node ends")
        self._say(f"the process of part {holder.name} has ended ({death}) and is started anew")
        time.sleep(delay_s)
        self._fork(holder)

    # --- ranks

    def _form(self, message: messages.Form) -> None:
        """Have the holders fork this node's ranks of a group."""
        recipe, model, holders = self._recipe, self._model, self._holders
        assert recipe is not None, "nodes without parts are asked for no ranks"
        assert model is not None
        assert holders is not None
        cores = len(os.sched_getaffinity(0))
        threads = self._threads or max(1, cores // len(holders.reports))
        shape = msgspec.structs.replace(message.shape, num_threads=threads)
        wires = MemberWires(
            group=message.group,
            host=self._joining.host,
            port=message.port,
            secret=self._joining.secret,
            authority=None if self._joining.authority is None else str(self._joining.authority),
            is_local=self._joining.is_local,
            identity=self._identity,
            nodes=message.nodes,
        )
        own = [place for place, node in zip(shape.places, message.nodes, strict=True) if node == message.me]
        for stage in sorted({place.stage for place in own}):
            reducer = None if model.new_reducer is None else model.new_reducer(shape)
            for place in own:
                if place.stage == stage:
                    life = ask(holders.requests[place], Ask(shape, wires), [] if reducer is None else [reducer])
                    self._ranks[life.fileno()] = _Rank(message.group, life)
                    self._poll.register(life, select.POLLIN)
            if reducer is not None:
                os.close(reducer)

    def _on_rank(self, fd: int) -> None:
        """Tell the hub of a rank's end."""
        rank = self._ranks[fd]
        data = b""
        with suppress(OSError):
            data = rank.life.recv(_MESSAGE_NBYTES)
        told = decode_told(data) if data else None
        if isinstance(told, Born):
            rank.pid = told.pid
            return
        self._forget(fd)
        if told is None:  # it went with its holder
            self._send(messages.RankEnded(rank.group, None, signal.SIGKILL, False))
        else:
            self._send(messages.RankEnded(rank.group, told.exit_code, told.signal, told.is_out_of_memory))

    def _look(self) -> None:
        """Tell the hub of ranks that a signal has stopped, at two looks, as of killed ones."""
        for rank in self._ranks.values():
            is_still = rank.pid is not None and is_stopped(rank.pid)
            if is_still and rank.was_stopped:
                self._send(messages.RankEnded(rank.group, None, signal.SIGSTOP, False))
            rank.was_stopped = is_still

    def _forget(self, fd: int) -> None:
        """Close a rank's life socket: it is killed, if it lives."""
        self._poll.unregister(fd)
        self._ranks.pop(fd).life.close()
