"""Life of a rank whose group is on several hosts: join the master, meet the others, follow the messages."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
from mlsys_core.errors import ServingError
from torch import Tensor

from mlsys_orca.parallel.channels import RankLinks
from mlsys_orca.parallel.hosts.rendezvous import Joining, meet, name_of
from mlsys_orca.parallel.hosts.results import DistributedResultsOut, columns_of
from mlsys_orca.parallel.hosts.secrets import Identity
from mlsys_orca.parallel.hosts.tensors import STATES, SUMS, Outbox, TensorGroup, empty, wait_for
from mlsys_orca.parallel.messages import Hello
from mlsys_orca.parallel.placement import Placement
from mlsys_orca.parallel.rank import Rank
from mlsys_orca.parallel.shard import GroupBrokenError, Reducer, Shard
from mlsys_orca.parallel.tensors.ring import KvMemory
from mlsys_orca.parallel.tensors.shared_memory import SharedReducer
from mlsys_orca.parallel.wiring import GroupShape

_log = logging.getLogger(__name__)
TIMEOUT_S = 60.0  # for all ranks of a group to meet


class MemberWires(msgspec.Struct, tag=1, frozen=True, kw_only=True):
    """Data with which a rank joins its group; goes from a node to its holders."""

    group: str
    host: str  # of the server
    port: int  # of the master
    secret: bytes
    authority: str | None
    is_local: bool
    identity: Identity
    nodes: tuple[int, ...]  # of all places, stage after stage

    @property
    def joining(self) -> Joining:
        """Address and secret with which the rank joins."""
        authority = None if self.authority is None else Path(self.authority)
        return Joining(host=self.host, secret=self.secret, authority=authority, is_local=self.is_local)


def number_of(place: Placement) -> int:
    """Return a rank's number in its group; the master's is 0.

    Example:
        >>> number_of(Placement(stage=1, num_stages=2, rank=0, num_ranks=2))
        3
    """
    return 1 + place.stage * place.num_ranks + place.rank


def carriers_of(place: Placement, nodes: tuple[int, ...]) -> dict[int, int]:
    """Return, by rank of ``place``'s stage, the first rank on that one's node: who carries its slots.

    Args:
        place: Any of the stage.
        nodes: Of all places, stage after stage.

    Example:
        >>> carriers_of(Placement(rank=3, num_ranks=4), (7, 7, 8, 8))
        {0: 0, 1: 0, 2: 2, 3: 2}
    """
    own = nodes[place.stage * place.num_ranks :][: place.num_ranks]
    return {rank: own.index(node) for rank, node in enumerate(own)}


def live_as_member(
    place: Placement,
    shard: Shard,
    hello: Hello,
    shape: GroupShape,
    wires: MemberWires,
    memory: KvMemory,
    make_reducer: Callable[[], Reducer] | None,
) -> int:
    """Be a rank of a group until a neighbour goes; return the exit code.

    Args:
        place: The rank's.
        shard: Its part, not joined yet.
        hello: Its greeting.
        shape: The group's sizes.
        wires: How to join it.
        memory: Of its keys and values.
        make_reducer: Makes its view of the memory in which local ranks of its stage meet; None: there is one rank.
    """
    with suppress(GroupBrokenError, BrokenPipeError, ConnectionResetError):
        ours = msgspec.structs.replace(wires.identity, name=name_of(wires.group, place))
        try:
            channel, tensors = meet(
                wires.joining,
                wires.port,
                ours,
                number=number_of(place),
                size=1 + len(shape.places),
                timeout_s=TIMEOUT_S,
            )
        except GroupBrokenError:
            raise
        except ServingError as error:  # the master is gone, or has told why it does not want this one
            _log.warning("rank %d of stage %d cannot join its group: %s", place.rank, place.stage, error)
            return 0
        reducer = None if make_reducer is None else make_reducer()
        joined = shard.join(reducer, num_threads=shape.num_threads)
        if isinstance(reducer, SharedReducer):
            _carry(place, reducer, tensors, wires.nodes)
        links = RankLinks(
            up=channel,
            down=channel,
            onward=(),
            states_in=None if place.is_first else _states_in(place, shape, tensors),
            states_out=_states_out(place, shape, tensors) if place.rank == 0 and not place.is_last else None,
            results=_results(place, shape, tensors) if place.is_last else None,
        )
        Rank(
            joined,
            links,
            lambda replica: joined.new_kv_cache(
                num_blocks=shape.num_blocks, dtype=shape.kv_dtype, empty=memory.take(replica)
            ),
            hello=hello,
            kv_identity=memory.identity,
        ).run()
    return 0


def _carry(place: Placement, reducer: SharedReducer, tensors: TensorGroup, nodes: tuple[int, ...]) -> None:
    """Carry the stage's slots between hosts, if this rank is its node's first and there are others."""
    carriers = carriers_of(place, nodes)
    others = {rank: carrier for rank, carrier in carriers.items() if carrier != carriers[place.rank]}
    if others and carriers[place.rank] == place.rank:
        first = number_of(place) - place.rank
        local = [rank for rank in carriers if rank not in others]
        numbers = {rank: first + carrier for rank, carrier in others.items()}
        SumsCarrier(reducer, tensors, local=local, others=numbers).start()


def _states_in(place: Placement, shape: GroupShape, tensors: TensorGroup) -> DistributedIn:
    controller = 1 + (place.stage - 1) * place.num_ranks
    return DistributedIn(tensors, hidden_size=shape.hidden_size, sender=controller)


def _states_out(place: Placement, shape: GroupShape, tensors: TensorGroup) -> DistributedOut:
    first = 1 + (place.stage + 1) * place.num_ranks
    receivers = range(first, first + place.num_ranks)
    return DistributedOut(tensors, hidden_size=shape.hidden_size, depth=shape.max_in_flight, receivers=receivers)


def _results(place: Placement, shape: GroupShape, tensors: TensorGroup) -> DistributedResultsOut:
    columns = columns_of(place.rank, place.num_ranks, shape.vocab_size)
    return DistributedResultsOut(tensors, columns=columns, vocab_size=shape.vocab_size, depth=shape.max_in_flight)


class DistributedOut:
    """Stage's way to the next one: :class:`~mlsys_orca.parallel.channels.StatesOut`.

    Args:
        group: The tensors' way.
        hidden_size: Of the model.
        depth: Iterations in flight at most.
        receivers: Numbers of the next stage's ranks in the group.
    """

    def __init__(self, group: TensorGroup, *, hidden_size: int, depth: int, receivers: Sequence[int]) -> None:
        self._hidden_size, self._receivers = hidden_size, list(receivers)
        self._outbox = Outbox(group, STATES, depth=depth)
        self._rooms: dict[int, Tensor] = {}  # by iteration, until it is sent

    def room(self, number: int, num_tokens: int) -> Tensor:
        """See :class:`~mlsys_orca.parallel.channels.StatesOut`."""
        room = self._rooms[number] = empty(num_tokens, self._hidden_size)
        return room

    def send(self, number: int) -> None:
        """See :class:`~mlsys_orca.parallel.channels.StatesOut`.

        Raises:
            GroupBrokenError: the next stage is gone.
        """
        self._outbox.send(self._rooms.pop(number), self._receivers)


class DistributedIn:
    """One rank's way from the stage before: :class:`~mlsys_orca.parallel.channels.StatesIn`.

    Args:
        group: The tensors' way.
        hidden_size: Of the model.
        sender: Number of the stage's controller in the group.
    """

    def __init__(self, group: TensorGroup, *, hidden_size: int, sender: int) -> None:
        self._group, self._hidden_size, self._sender = group, hidden_size, sender

    def receive(self, number: int, num_tokens: int) -> Tensor:
        """See :class:`~mlsys_orca.parallel.channels.StatesIn`."""
        states = empty(num_tokens, self._hidden_size)
        self._group.receive(states, self._sender, STATES)
        return states


class SumsCarrier:
    """Carrier of one stage's slots between this host and the others.

    Args:
        reducer: The memory, as the first local rank has it.
        group: The tensors' way.
        local: Ranks of the stage on this host.
        others: Ranks on other hosts, with the number in the group of the process that carries for each.
    """

    def __init__(
        self, reducer: SharedReducer, group: TensorGroup, *, local: Collection[int], others: Mapping[int, int]
    ) -> None:
        self._reducer, self._group = reducer, group
        self._local, self._others = sorted(local), sorted(others.items())
        self._carriers = sorted(set(others.values()))
        self._views = {rank: reducer.view_of(rank) for rank in (*local, *others)}

    def start(self) -> None:
        """Carry in a thread, until a host is gone or the meetings are aborted."""
        threading.Thread(target=self._run, name="orca-sums", daemon=True).start()

    def _run(self) -> None:
        number = 1
        try:
            with torch.inference_mode():
                while self.carry(number):
                    number = (number + 1) % 2**32
        except GroupBrokenError as error:
            _log.debug("sums are carried no more: %s", error)
        self._reducer.abort()

    def carry(self, number: int) -> bool:
        """Carry the slots of one meeting; return False if it was aborted.

        Raises:
            GroupBrokenError: another host is gone.
        """
        num_floats = 0
        sending = []
        for rank in self._local:
            num_floats = self._views[rank].wait(number)
            if num_floats < 0:
                return False
            slot = self._reducer.slot(number, rank, num_floats)
            sending += [self._group.send(slot, carrier, SUMS + rank) for carrier in self._carriers if num_floats]
        for rank, carrier in self._others:
            if num_floats:
                self._group.receive(self._reducer.slot(number, rank, num_floats), carrier, SUMS + rank)
        for work in sending:
            wait_for(work)
        for rank, _ in self._others:
            self._views[rank].arrive(number, num_floats)
        return True
