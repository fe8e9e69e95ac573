"""Options of a model whose parts Ray places over a cluster's nodes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from mlsys_core.errors import InvalidInputError
from mlsys_orca.cli.hosts import HostOptions

Executor = Annotated[
    str,
    typer.Option(help="Who places the parts: 'local', on this machine or --nodes; 'ray', over a Ray cluster's nodes."),
]
RayAddress = Annotated[
    str, typer.Option(help="HOST:PORT of the Ray cluster's head; 'auto': of the cluster that this machine is in.")
]


def refuse_ray(executor: str, reasons: Mapping[str, object]) -> None:
    """See that the executor is one that there is, and that nothing was asked for which it decides.

    Args:
        executor: As given.
        reasons: By option, what was given: anything that is not false is refused with Ray.

    Raises:
        InvalidInputError: something was.
    """
    if executor not in ("local", "ray"):
        raise InvalidInputError(f"--executor is local or ray, not {executor!r}")
    if executor == "ray" and (given := [name for name, value in reasons.items() if value]):
        raise InvalidInputError(f"--executor ray decides about {given[0]} itself: leave one of them out")


def ray_options(
    model: str,
    *,
    address: str,
    listen: str | None,
    tensor_parallel: int,
    pipeline_parallel: int,
    replicas: int,
    threads: int,
    heartbeat_timeout: float,
    join_timeout: float,
) -> HostOptions:
    """Look at the cluster, and return the options of a model over its nodes.

    Args:
        model: As given; each node finds its own copy by it.
        address: Of the cluster.
        listen: Where nodes join; None: this machine's address in the cluster, any free port.
        tensor_parallel: As given.
        pipeline_parallel: As given.
        replicas: As given.
        threads: Of each rank; 0: 1.
        heartbeat_timeout: Seconds.
        join_timeout: Seconds.

    Raises:
        InvalidInputError: there is no such cluster, or the parts do not fit it.
        MissingDependencyError: Ray is not installed.
    """
    from mlsys_orca.parallel.hosts.settings import parse_address
    from mlsys_orca.parallel.ray.cluster import look
    from mlsys_orca.parallel.ray.plan import plan_seats
    from mlsys_orca.parallel.ray.settings import RaySettings

    own = None if listen is None else parse_address(listen, "--listen")
    cluster = look(address)
    plan = plan_seats(
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        num_replicas=replicas,
        num_threads=threads or 1,
        cores=cluster.cores,
    )
    return HostOptions(
        num_nodes=plan.num_seats,
        address=own or (cluster.host, 0),
        secret=os.urandom(32).hex().encode(),
        tls=None,  # the authority would have to be on each node
        holds_parts=False,
        num_threads=threads or 1,
        heartbeat_timeout_s=heartbeat_timeout,
        join_timeout_s=join_timeout,
        ray=RaySettings(
            address=cluster.address,
            model=str(Path(model).resolve()) if Path(model).exists() else model,
            cores=plan.cores,
            nodes=plan.nodes,
            num_threads=threads or 1,
            silence_s=heartbeat_timeout,
        ),
    )
