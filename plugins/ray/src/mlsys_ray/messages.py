"""Messages between keeper, masters and rank actors: MessagePack, of the types below. Imports no torch and no Ray.

Ray carries them as bytes, in actor calls; the keeper's go to the supervisor over a local socket.
"""

from __future__ import annotations

import msgspec
from mlsys_orca.cli.placing import PlacedModel
from mlsys_orca.parallel.placement import Placement
from mlsys_orca.parallel.wiring import GroupShape


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Seats of one server on a Ray cluster; plain data."""

    address: str  # HOST:PORT of the cluster's head
    host: str  # this machine's address in it
    run: str  # Ray's namespace of the rank actors, new for each server, whose process it names
    model: PlacedModel
    cores: int  # of each seat
    nodes: tuple[str, ...]  # Ray's id of each seat's first node


class Part(msgspec.Struct, frozen=True, kw_only=True, tag="part"):
    """An actor has its part of the model."""

    node: str  # Ray's id
    nbytes: int  # of its weights
    is_native: bool
    dtype: str
    needs_logits: bool
    available_nbytes: int  # memory of the node


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A part cannot be loaded, or the parts do not come in time."""

    message: str


class Started(msgspec.Struct, frozen=True, tag="started"):
    """Keeper to supervisor: all parts are there. Those of the first replica, by place."""

    parts: tuple[Part, ...]
    available_nbytes: int  # for keys and values of one replica


class Joining(msgspec.Struct, frozen=True, kw_only=True):
    """Master to rank: join a group."""

    group: str  # a random name
    shape: GroupShape
    store: tuple[str, int]  # address of torch.distributed's store, which is the master's
    nodes: tuple[str, ...]  # of all places, stage after stage


encode = msgspec.msgpack.Encoder().encode
decode_part = msgspec.msgpack.Decoder(Part | Failed).decode
decode_start = msgspec.msgpack.Decoder(Started | Failed).decode
decode_joining = msgspec.msgpack.Decoder(Joining).decode


def actor_name(replica: int, place: Placement, generation: int) -> str:
    """Return the name of a rank's actor; a seat that moves has a higher generation.

    Example:
        >>> actor_name(0, Placement(stage=1, num_stages=2), 7)
        '0.1.0#7'
    """
    return f"{replica}.{place.stage}.{place.rank}#{generation}"


def newest(names: list[str], replica: int, place: Placement) -> str | None:
    """Return the name of the youngest actor of a place; None: there is none.

    Example:
        >>> newest(["0.0.0#9", "0.0.0#10", "0.1.0#11"], 0, Placement())
        '0.0.0#10'
    """
    start = actor_name(replica, place, 0)[:-1]
    return max(
        (name for name in names if name.startswith(start)), key=lambda name: int(name[len(start) :]), default=None
    )
