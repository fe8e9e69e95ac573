"""Settings of a model whose parts Ray places. Plain data."""

from __future__ import annotations

import msgspec


class RaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Seats of one server on a Ray cluster."""

    address: str  # HOST:PORT of the cluster's head
    model: str  # name or path, by which each node finds its copy
    cores: int  # of each seat
    nodes: tuple[str, ...]  # Ray's id of each seat's first node
    num_threads: int  # of each rank
    silence_s: float  # after which a seat's node is given up
