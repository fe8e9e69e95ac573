"""A holder: the process that loads one part of a model once, and forks a rank from it for each group.

It computes nothing, so it lives long; a rank's weights are its pages, shared. Whoever builds a group asks for a rank
with one message that brings the rank's descriptors and a *life* socket. When the asker's end of that is closed, the
rank is killed; when the rank ends, its death is told there.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import msgspec
from mlsys_core.errors import MlsysError
from mlsys_core.posix import message_pair, receive_descriptors, send_descriptors
from mlsys_serving.processes import Child, Death

from mlsys_orca.parallel.messages import Hello
from mlsys_orca.parallel.native_shard import NativeShard
from mlsys_orca.parallel.placement import Placement
from mlsys_orca.parallel.rank import Rank
from mlsys_orca.parallel.shard import GroupBrokenError, Reducer, Shard
from mlsys_orca.parallel.tensors.ring import KvMemory
from mlsys_orca.parallel.wiring import GroupShape, RankWires

_MESSAGE_NBYTES = 1 << 16
_MAX_FDS = 64


class Ask(msgspec.Struct, frozen=True):
    """Fork a rank. With it come the life socket, and the descriptors that ``wires`` numbers."""

    shape: GroupShape
    wires: RankWires


class Born(msgspec.Struct, frozen=True, tag=0):
    """A rank lives; the first word on its life socket."""

    pid: int


class Died(msgspec.Struct, frozen=True, tag=1):
    """A rank has ended; the last word there."""

    exit_code: int | None
    signal: int | None
    is_out_of_memory: bool


class Loaded(msgspec.Struct, frozen=True, tag=0):
    """The holder is ready."""

    nbytes: int  # of its weights
    is_native: bool
    dtype: str
    needs_logits: bool


class Failed(msgspec.Struct, frozen=True, tag=1):
    """The part cannot be loaded."""

    message: str
    exit_code: int


decode_report = msgspec.msgpack.Decoder(Loaded | Failed).decode
decode_told = msgspec.msgpack.Decoder(Born | Died).decode
_encode = msgspec.msgpack.Encoder().encode
_decode_ask = msgspec.msgpack.Decoder(Ask).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderSettings:
    """All that a holder needs; made before the fork."""

    place: Placement
    load: Callable[[Placement], Shard]
    kv_memory: KvMemory  # of this place
    hello_of: Callable[[Shard], Hello]
    reducer_of: Callable[[Placement, int], Reducer] | None  # over a descriptor; None: one rank in a stage
    requests: socket.socket  # where askers' messages come
    report: socket.socket  # where the first outcome of loading goes


@dataclass(slots=True)
class _RankChild:
    child: Child
    life: socket.socket


def hold(settings: HolderSettings) -> int:
    """Load the part, and fork ranks from it until this process is killed; return an exit code if it cannot be."""
    try:
        shard = settings.load(settings.place)
    except MlsysError as error:
        _report(settings.report, Failed(str(error), getattr(error, "exit_code", 1)))
        return 1
    hello = settings.hello_of(shard)
    dtype = str(getattr(shard, "dtype", ""))
    _report(settings.report, Loaded(shard.nbytes, isinstance(shard, NativeShard), dtype, shard.needs_logits))
    ranks: dict[int, _RankChild] = {}  # by the descriptors of their ends and of their life sockets
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        _serve(settings, shard, hello, ranks)
    finally:
        children = [rank.child for fd, rank in ranks.items() if fd == rank.child.fd]
        for child in children:
            child.send_signal(signal.SIGKILL)
        for child in children:
            child.wait()


def _serve(settings: HolderSettings, shard: Shard, hello: Hello, ranks: dict[int, _RankChild]) -> NoReturn:
    """Fork ranks as they are asked for, and tell of their ends."""
    poll = select.poll()
    poll.register(settings.requests, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == settings.requests.fileno():
                rank = _fork(settings, shard, hello, [each.life for each in ranks.values()])
                if rank is not None:
                    for end, events in ((rank.child.fd, select.POLLIN), (rank.life.fileno(), select.POLLIN)):
                        poll.register(end, events)
                        ranks[end] = rank
            elif (found := ranks.get(fd)) is None:
                continue  # it has ended in this very round
            elif fd == found.life.fileno():  # nobody sends anything there: the asker is gone
                poll.unregister(fd)
                found.child.send_signal(signal.SIGKILL)
            else:
                _bury(found, ranks, poll)


def _fork(settings: HolderSettings, shard: Shard, hello: Hello, others: list[socket.socket]) -> _RankChild | None:
    payload, fds = receive_descriptors(settings.requests, _MESSAGE_NBYTES, _MAX_FDS)
    ask = _decode_ask(payload)
    life = socket.socket(fileno=fds[0])

    def live() -> int:
        for end in (life, *others):
            end.close()
        return live_as_rank(settings, shard, hello, ask.shape, ask.wires.renumbered(lambda index: fds[index]))

    child = Child("mlsys-rank", live)
    with suppress(OSError):  # who asked is gone, which the socket's end tells
        life.send(_encode(Born(child.pid)))
    for fd in fds[1:]:
        os.close(fd)
    return _RankChild(child, life)


def live_as_rank(settings: HolderSettings, shard: Shard, hello: Hello, shape: GroupShape, wires: RankWires) -> int:
    """Be a rank until a neighbour goes; return the exit code."""
    reducer = None
    if settings.reducer_of is not None and wires.reducer is not None:
        reducer = settings.reducer_of(settings.place, wires.reducer)
    joined = shard.join(reducer, num_threads=shape.num_threads)
    memory = settings.kv_memory

    with suppress(GroupBrokenError, BrokenPipeError, ConnectionResetError):  # who died of itself tells why
        Rank(
            joined,
            wires.links(shape, settings.place),
            lambda replica: joined.new_kv_cache(
                num_blocks=shape.num_blocks, dtype=shape.kv_dtype, empty=memory.take(replica)
            ),
            hello=hello,
            kv_identity=memory.identity,
        ).run()
    return 0


def _bury(rank: _RankChild, ranks: dict[int, _RankChild], poll: select.poll) -> None:
    """Tell of a rank's end, and forget it."""
    fd, life = rank.child.fd, rank.life.fileno()
    poll.unregister(fd)
    with suppress(KeyError):
        poll.unregister(life)
    del ranks[fd], ranks[life]
    death: Death = rank.child.wait()
    with suppress(OSError):
        rank.life.send(_encode(Died(death.exit_code, death.signal, death.is_out_of_memory)))
    rank.life.close()


def ask_for_rank(requests: socket.socket, shape: GroupShape, wires: RankWires) -> socket.socket:
    """Have the holder behind ``requests`` fork a rank; return the asker's end of its life socket."""
    fds = wires.fds()
    places = {fd: index for index, fd in enumerate(fds, start=1)}  # behind the life socket
    ours, theirs = message_pair()
    message = Ask(shape, wires.renumbered(lambda fd: places[fd]))
    send_descriptors(requests, _encode(message), [theirs.fileno(), *fds])
    theirs.close()
    return ours


def _report(end: socket.socket, message: Loaded | Failed) -> None:
    with suppress(OSError):  # it is read once, at the start
        end.send(_encode(message), socket.MSG_DONTWAIT)
