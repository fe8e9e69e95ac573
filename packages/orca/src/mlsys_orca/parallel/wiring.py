"""Descriptors of one group on one host: sockets for control, shared memory for tensors, and who holds which end.

The master makes them all and hands each rank its own, through the holder that forks it. Numbers of a message are places
in the list of descriptors that comes with it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from mlsys_core.posix import stream_pair

from mlsys_orca.parallel.channels import RankLinks, SocketChannel
from mlsys_orca.parallel.executor import MasterLinks
from mlsys_orca.parallel.placement import Placement, all_places
from mlsys_orca.parallel.tensors.ring import Results, RingIn, RingOut, Slots, new_memory, new_wake, states_nbytes


class GroupShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that master and ranks must agree on."""

    tensor_parallel: int
    pipeline_parallel: int
    max_in_flight: int
    max_tokens: int  # of an iteration
    max_rows: int  # of logits of an iteration
    hidden_size: int
    vocab_size: int
    num_blocks: int  # of keys and values
    num_threads: int  # of each rank
    kv_dtype: str | None = None  # of keys and values, as torch calls it; None: the parts' own

    @property
    def places(self) -> list[Placement]:
        """All places, stage after stage."""
        return all_places(tensor_parallel=self.tensor_parallel, pipeline_parallel=self.pipeline_parallel)

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory if every slot were filled."""
        states = states_nbytes(self.max_tokens, self.hidden_size) * (self.pipeline_parallel - 1)
        return self.max_in_flight * (states + self.results_nbytes)

    @property
    def results_nbytes(self) -> int:
        """Bytes of one iteration's results."""
        return Results.slot_nbytes(max_rows=self.max_rows, vocab_size=self.vocab_size, num_ranks=self.tensor_parallel)

    def results(self, fd: int) -> Results:
        """Return the results in the memory of ``fd``."""
        return Results(
            fd,
            depth=self.max_in_flight,
            max_rows=self.max_rows,
            vocab_size=self.vocab_size,
            num_ranks=self.tensor_parallel,
        )

    def slots(self, fd: int) -> Slots:
        """Return the states in the memory of ``fd``."""
        return Slots(fd, depth=self.max_in_flight, slot_nbytes=states_nbytes(self.max_tokens, self.hidden_size))


class RankWires(msgspec.Struct, frozen=True, kw_only=True):
    """Descriptors of one rank."""

    up: int
    down: int
    onward: tuple[int, ...] = ()
    states_in: tuple[int, int] | None = None  # memory, counter
    states_out: tuple[int, tuple[int, ...]] | None = None  # memory, counters
    results: int | None = None
    reducer: int | None = None

    def fds(self) -> list[int]:
        """Return all of them, in a fixed order."""
        found: list[int] = []

        def note(fd: int) -> int:
            found.append(fd)
            return fd

        self.renumbered(note)
        return found

    def renumbered(self, new: Callable[[int], int]) -> RankWires:
        """Return the same with another number for each."""
        return RankWires(
            up=new(self.up),
            down=new(self.down),
            onward=tuple(map(new, self.onward)),
            states_in=None if self.states_in is None else (new(self.states_in[0]), new(self.states_in[1])),
            states_out=None
            if self.states_out is None
            else (new(self.states_out[0]), tuple(map(new, self.states_out[1]))),
            results=None if self.results is None else new(self.results),
            reducer=None if self.reducer is None else new(self.reducer),
        )

    def links(self, shape: GroupShape, place: Placement) -> RankLinks:
        """Return the channels over them, which own the sockets."""
        down = socket.socket(fileno=self.down)
        states_in = states_out = results = None
        if self.states_in is not None:
            memory, wake = self.states_in
            states_in = RingIn(shape.slots(memory), shape.hidden_size, wake, down.fileno())
        if self.states_out is not None:
            memory, wakes = self.states_out
            states_out = RingOut(shape.slots(memory), shape.hidden_size, wakes)
        if self.results is not None:
            results = shape.results(self.results).of_rank(place.rank)
        return RankLinks(
            up=SocketChannel(socket.socket(fileno=self.up)),
            down=SocketChannel(down),
            onward=[SocketChannel(socket.socket(fileno=fd)) for fd in self.onward],
            states_in=states_in,
            states_out=states_out,
            results=results,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """All descriptors of a new group. Owner: the master, until each rank has its own."""

    shape: GroupShape
    down: int  # the master's end to the first controller
    ups: dict[Placement, int]  # the master's ends
    results: int
    ranks: dict[Placement, RankWires]

    @classmethod
    def new(cls, shape: GroupShape, *, new_reducer: Callable[[], int] | None = None) -> Wiring:
        """Make the descriptors of a group.

        Args:
            shape: Its sizes.
            new_reducer: Makes the memory in which the ranks of a stage meet; None: there is one rank in each.
        """
        ups = {place: _pair() for place in shape.places}
        downs = {place: _pair() for place in shape.places}  # (sender's, the rank's)
        results = new_memory("orca-results", shape.max_in_flight * shape.results_nbytes)
        stages = range(shape.pipeline_parallel)
        nbytes = shape.max_in_flight * states_nbytes(shape.max_tokens, shape.hidden_size)
        rings = {stage: new_memory("orca-states", nbytes) for stage in stages[1:]}  # by the stage that reads
        wakes = {place: new_wake() for place in shape.places if not place.is_first}
        reducers = {stage: None if new_reducer is None else new_reducer() for stage in stages}
        ranks = {}
        for place in shape.places:
            followers = [other for other in shape.places if _follows(other, place)]
            behind = [other for other in shape.places if other.stage == place.stage + 1]
            sends = place.rank == 0 and not place.is_last
            ranks[place] = RankWires(
                up=ups[place][1],
                down=downs[place][1],
                onward=tuple(downs[other][0] for other in followers),
                states_in=None if place.is_first else (os.dup(rings[place.stage]), wakes[place]),
                states_out=(os.dup(rings[place.stage + 1]), tuple(os.dup(wakes[other]) for other in behind))
                if sends
                else None,
                results=os.dup(results) if place.is_last else None,
                reducer=None if (fd := reducers[place.stage]) is None else os.dup(fd),
            )
        for fd in (*rings.values(), *(fd for fd in reducers.values() if fd is not None)):
            os.close(fd)
        first = shape.places[0]
        return cls(
            shape=shape,
            down=downs[first][0],
            ups={place: pair[0] for place, pair in ups.items()},
            results=results,
            ranks=ranks,
        )

    def hand_over(self, place: Placement) -> None:
        """Close this process's copies of a rank's descriptors, which another process has now."""
        for fd in self.ranks[place].fds():
            os.close(fd)

    def links(self) -> MasterLinks:
        """Return the master's channels, which own its sockets."""
        results = self.shape.results(self.results)
        os.close(self.results)
        return MasterLinks(
            down=[SocketChannel(socket.socket(fileno=self.down))],
            ups=[(place, SocketChannel(socket.socket(fileno=fd))) for place, fd in self.ups.items()],
            results=results,
        )


def _follows(other: Placement, place: Placement) -> bool:
    """Return whether ``other`` gets its control messages from ``place``."""
    if place.rank != 0:
        return False
    is_rank = other.stage == place.stage and other.rank > 0
    return is_rank or (other.stage == place.stage + 1 and other.rank == 0)


def _pair() -> tuple[int, int]:
    ours, theirs = stream_pair()
    return ours.detach(), theirs.detach()
