"""Which node has which part of a model; pure.

Between the command line (degrees, replicas, nodes) and the hub, which gives seats to the nodes that join.
"""

from __future__ import annotations

from mlsys_core.errors import InvalidInputError

from mlsys_orca.parallel.placement import Placement, all_places

Assignment = dict[tuple[int, Placement], int]  # (replica, place) -> number of the node


def assign(*, tensor_parallel: int, pipeline_parallel: int, num_replicas: int, num_nodes: int) -> Assignment:
    """Return the node of each part of each replica: stages go over nodes first, the ranks of a stage stay together.

    Replicas are divided over the nodes, or the nodes over the replicas, whichever are fewer. Within a replica each
    stage has one node as long as there are no more nodes than stages; else its ranks are divided over several.

    Args:
        tensor_parallel: Ranks of each stage.
        pipeline_parallel: Stages.
        num_replicas: Replicas.
        num_nodes: Nodes, numbered from 0.

    Raises:
        InvalidInputError: some node would have no part.

    Example:
        >>> found = assign(tensor_parallel=1, pipeline_parallel=2, num_replicas=1, num_nodes=2)
        >>> [(place.stage, node) for (_, place), node in found.items()]
        [(0, 0), (1, 1)]
    """
    places = all_places(tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel)
    most = len(places) * num_replicas
    if num_nodes > most:
        raise InvalidInputError(
            f"{num_nodes} nodes are too many: {num_replicas} replica{'s' * (num_replicas > 1)} of {len(places)} "
            f"part{'s' * (len(places) > 1)} can use {most}"
        )
    found: Assignment = {}
    for replica in range(num_replicas):
        nodes = _nodes_of(replica, num_replicas, num_nodes)
        for place in places:
            stage_nodes = _share(nodes, place.stage, pipeline_parallel)
            found[replica, place] = _share(stage_nodes, place.rank, tensor_parallel)[0]
    return found


def parts_of(assignment: Assignment, node: int) -> dict[Placement, tuple[int, ...]]:
    """Return the places of a node, each with the replicas whose parts run there."""
    found: dict[Placement, tuple[int, ...]] = {}
    for (replica, place), where in assignment.items():
        if where == node:
            found[place] = (*found.get(place, ()), replica)
    return found


def _nodes_of(replica: int, num_replicas: int, num_nodes: int) -> range:
    if num_replicas >= num_nodes:
        return range(replica % num_nodes, replica % num_nodes + 1)
    return range(num_nodes * replica // num_replicas, num_nodes * (replica + 1) // num_replicas)


def _share(nodes: range, index: int, number: int) -> range:
    """Return the nodes of part ``index`` of ``number`` parts that follow each other; neighbours may share one."""
    if len(nodes) <= number:
        at = nodes.start + len(nodes) * index // number
        return range(at, at + 1)
    return range(nodes.start + len(nodes) * index // number, nodes.start + len(nodes) * (index + 1) // number)
