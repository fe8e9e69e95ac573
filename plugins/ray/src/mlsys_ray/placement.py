"""Placement of a server's nodes by Ray: the policy behind ``mlsys orca serve --executor ray``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlsys_ray.cluster import look
from mlsys_ray.launcher import Launch, RaySettings, become_launcher
from mlsys_ray.node import NodeOrder
from mlsys_ray.plan import plan_seats


@dataclass(frozen=True, slots=True)
class RayPlacer:
    """Seats on a Ray cluster: :class:`~mlsys_orca.parallel.hosts.settings.NodePlacer`."""

    settings: RaySettings
    host: str  # this machine's address in the cluster

    @property
    def num_nodes(self) -> int:
        """Number of seats."""
        return len(self.settings.nodes)

    def keep_nodes(self, *, join: tuple[str, int], secret: bytes, lost: int) -> int:
        """Turn this forked process into the launcher of nodes; does not return."""
        order = NodeOrder(
            model=self.settings.model,
            host=join[0],
            port=join[1],
            secret=secret,
            seat=0,
            num_threads=self.settings.num_threads,
        )
        return become_launcher(Launch(settings=self.settings, order=order), lost)


def place_nodes(
    model: str,
    *,
    address: str,
    tensor_parallel: int,
    pipeline_parallel: int,
    num_replicas: int,
    num_threads: int,
    silence_s: float,
) -> RayPlacer:
    """Look at the cluster, and plan seats for a model's parts.

    Args:
        model: As given; each node finds its own copy by it.
        address: HOST:PORT of the cluster's head; ``"auto"``: the one that this machine is a node of.
        tensor_parallel: Ranks of each stage.
        pipeline_parallel: Stages.
        num_replicas: Replicas.
        num_threads: Threads of each rank.
        silence_s: Seconds after which a silent seat is given up.

    Raises:
        InvalidInputError: there is no such cluster, or the parts do not fit it.
        MissingDependencyError: Ray is not installed.
    """
    cluster = look(address)
    plan = plan_seats(
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        num_replicas=num_replicas,
        num_threads=num_threads,
        cores=cluster.cores,
    )
    settings = RaySettings(
        address=cluster.address,
        model=str(Path(model).resolve()) if Path(model).exists() else model,
        cores=plan.cores,
        nodes=plan.nodes,
        num_threads=num_threads,
        silence_s=silence_s,
    )
    return RayPlacer(settings, cluster.host)
