"""Seats of a model on a Ray cluster's nodes; pure.

A *seat* has the rank actors of one stage, or some of them. All seats are of one size, and each is a placement group of
one bundle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlsys_core.errors import InvalidInputError
from mlsys_orca.cli.placing import PlacedModel
from mlsys_orca.parallel.placement import Placement


@dataclass(frozen=True, slots=True)
class SeatPlan:
    """Size and first place of all seats: replica after replica, stage after stage."""

    cores: int  # of each seat
    nodes: tuple[str, ...]  # id of each seat's node

    @property
    def num_seats(self) -> int:
        """Number of seats."""
        return len(self.nodes)


def plan_seats(
    *, tensor_parallel: int, pipeline_parallel: int, num_replicas: int, num_threads: int, cores: Mapping[str, int]
) -> SeatPlan:
    """Return seats for all parts: a stage is parted between seats only if no node has the cores for it.

    A replica stays on one node if it fits there, so that its states do not travel; replicas go to the nodes with the
    most free cores, so that a lost node takes few of them.

    Args:
        tensor_parallel: Ranks of each stage.
        pipeline_parallel: Stages.
        num_replicas: Replicas.
        num_threads: Cores of each rank.
        cores: Cores of each node, by its id.

    Raises:
        InvalidInputError: they do not fit.

    Example:
        >>> plan_seats(tensor_parallel=1, pipeline_parallel=2, num_replicas=1, num_threads=1, cores={"a": 1, "b": 1})
        SeatPlan(cores=1, nodes=('a', 'b'))
    """
    for parts in range(1, tensor_parallel + 1):
        if tensor_parallel % parts == 0:
            size = tensor_parallel // parts * num_threads
            nodes = _pack(size, pipeline_parallel * parts, num_replicas, cores)
            if nodes is not None:
                return SeatPlan(size, nodes)
    needed = tensor_parallel * pipeline_parallel * num_replicas * num_threads
    raise InvalidInputError(
        f"{num_replicas} replicas of {pipeline_parallel} stages of {tensor_parallel} ranks with {num_threads} threads "
        f"each take {needed} cores, and do not fit the Ray cluster's nodes of {_listed(cores)} cores: ask for fewer, "
        "or add nodes"
    )


def ranks_of(seat: int, model: PlacedModel, cores: int) -> tuple[int, list[Placement]]:
    """Return the replica and the places of a seat's ranks.

    Args:
        seat: Its number.
        model: The division.
        cores: Of each seat.
    """
    size = cores // model.num_threads
    seats_of_stage = model.tensor_parallel // size
    replica, of_replica = divmod(seat, seats_of_stage * model.pipeline_parallel)
    stage, part = divmod(of_replica, seats_of_stage)
    num_stages, num_ranks = model.pipeline_parallel, model.tensor_parallel
    ranks = range(part * size, (part + 1) * size)
    return replica, [Placement(stage=stage, num_stages=num_stages, rank=rank, num_ranks=num_ranks) for rank in ranks]


def place(size: int, free: Mapping[str, int]) -> str | None:
    """Return the node with the most free cores, if it has ``size``; of equals the first; None: there is no room.

    Example:
        >>> place(2, {"a": 1, "b": 3})
        'b'
    """
    node = max(free, key=lambda each: free[each], default=None)
    return node if node is not None and free[node] >= size else None


def _pack(size: int, seats_of_replica: int, num_replicas: int, cores: Mapping[str, int]) -> tuple[str, ...] | None:
    free, found = dict(cores), []
    for _ in range(num_replicas):
        whole = place(size * seats_of_replica, free)
        for _ in range(seats_of_replica):
            node = whole or place(size, free)
            if node is None:
                return None
            free[node] -= size
            found.append(node)
    return tuple(found)


def _listed(cores: Mapping[str, int]) -> str:
    return ", ".join(str(each) for each in sorted(cores.values(), reverse=True)) or "no"
