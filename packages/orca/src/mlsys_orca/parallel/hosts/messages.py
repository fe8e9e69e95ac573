"""Messages between hub, nodes, masters and ranks: MessagePack, of the types below and no others. Imports no torch.

Between hub and node they go over the authenticated channel, between master and hub over a local socket, and between
master and rank over the rank's own channel until the group has met.
"""

from __future__ import annotations

import msgspec

from mlsys_orca.parallel.placement import Placement
from mlsys_orca.parallel.wiring import GroupShape

Place = tuple[int, int]  # stage, rank


def place_of(place: Placement) -> Place:
    """Return a place as messages have it."""
    return place.stage, place.rank


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Division of the model and the form of its parts: what a node must know to load some. Owner: the hub."""

    tensor_parallel: int
    pipeline_parallel: int
    num_replicas: int
    dtype: str
    weights: str | None
    activations: str | None

    def placement(self, place: Place) -> Placement:
        """Return a place of a message."""
        return Placement(
            stage=place[0], num_stages=self.pipeline_parallel, rank=place[1], num_ranks=self.tensor_parallel
        )


# --- hub to node


class Beat(msgspec.Struct, array_like=True, tag=0, frozen=True):
    """Either way: the sender lives."""


class Welcome(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """First message to a node."""

    silence_s: float  # after which the other side counts as lost


class Take(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """Load these parts; the node is no spare any more."""

    recipe: Recipe
    places: tuple[Place, ...]


class Form(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """Fork the ranks of a new group, which are to join its master."""

    group: str  # a random name
    shape: GroupShape
    port: int  # of the master, at the hub's host
    nodes: tuple[int, ...]  # of all places, stage after stage
    me: int  # which of these this node is


class End(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """End the ranks of a group."""

    group: str


class Leave(msgspec.Struct, array_like=True, tag=5, frozen=True):
    """Server ends, or does not want this node: end without an error, or with one."""

    error: str | None


# --- node to hub


class PartLoaded(msgspec.Struct, array_like=True, tag=10, frozen=True):
    """One of the parts is there."""

    place: Place
    nbytes: int
    is_native: bool
    dtype: str
    needs_logits: bool
    available_nbytes: int  # memory of the node that each of its parts may still take


class PartFailed(msgspec.Struct, array_like=True, tag=11, frozen=True):
    """One of the parts cannot be loaded; the node ends."""

    message: str


class RankEnded(msgspec.Struct, array_like=True, tag=12, frozen=True):
    """A rank has ended that was not told to."""

    group: str
    exit_code: int | None
    signal: int | None
    is_out_of_memory: bool


# --- master and hub


class Ask(msgspec.Struct, array_like=True, tag=20, frozen=True):
    """Master to hub, with the group's life socket: have the ranks of a group forked."""

    group: str
    replica: int
    shape: GroupShape
    port: int


class Waits(msgspec.Struct, array_like=True, tag=21, frozen=True):
    """Hub to master, on the life socket: parts are missing."""

    reason: str


class Coming(msgspec.Struct, array_like=True, tag=22, frozen=True):
    """Hub to master: all nodes were asked for their ranks."""


class Ended(msgspec.Struct, array_like=True, tag=23, frozen=True):
    """Hub to master: a rank of the group has ended, or its node is lost."""

    exit_code: int | None
    signal: int | None
    is_out_of_memory: bool
    reason: str


# --- hub to supervisor, until all parts are loaded


class Started(msgspec.Struct, array_like=True, tag=30, frozen=True):
    """All parts are there, in the order of the places."""

    parts: tuple[PartLoaded, ...]


class NotStarted(msgspec.Struct, array_like=True, tag=31, frozen=True):
    """They will not be."""

    message: str


# --- between master and rank, until the group has met


class Put(msgspec.Struct, array_like=True, tag=40, frozen=True):
    """Either way: an entry of the store in which torch.distributed's processes find each other."""

    key: str
    value: bytes


class Met(msgspec.Struct, array_like=True, tag=41, frozen=True):
    """Rank to master: it is connected to all; master to ranks: all are."""


encode = msgspec.msgpack.Encoder().encode
decode_for_node = msgspec.msgpack.Decoder(Beat | Welcome | Take | Form | End | Leave).decode
decode_for_hub = msgspec.msgpack.Decoder(Beat | PartLoaded | PartFailed | RankEnded).decode
decode_ask = msgspec.msgpack.Decoder(Ask).decode
decode_life = msgspec.msgpack.Decoder(Waits | Coming | Ended).decode
decode_start = msgspec.msgpack.Decoder(Started | NotStarted).decode
decode_meeting = msgspec.msgpack.Decoder(Put | Met).decode
