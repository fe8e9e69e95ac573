"""Options of a model whose ranks another engine places on several machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from mlsys_core.errors import InvalidInputError

if TYPE_CHECKING:
    from mlsys_orca.parallel.ranks import RankPlacer

Executor = Annotated[
    str, typer.Option(help="Who places the model's parts: 'local', on this machine; 'ray', over a Ray cluster's nodes.")
]
RayAddress = Annotated[
    str, typer.Option(help="HOST:PORT of the Ray cluster's head; 'auto': of the cluster that this machine is in.")
]
HeartbeatTimeout = Annotated[
    float, typer.Option(min=0.5, help="Seconds of silence after which a part on another machine is lost.")
]
JoinTimeout = Annotated[
    float, typer.Option(min=1, help="Seconds for all parts on other machines to load at the start.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedModel:
    """All that a placement policy knows of a model; plain data."""

    model: str  # as given; each machine finds its own copy by it
    address: str  # of the cluster
    tensor_parallel: int
    pipeline_parallel: int
    num_replicas: int
    num_threads: int  # of each rank
    dtype: str
    weights: str | None
    activations: str | None
    heartbeat_timeout_s: float
    join_timeout_s: float


def find_placer(executor: str, model: PlacedModel) -> RankPlacer:
    """Return the placer of a registered placement policy.

    Raises:
        InvalidInputError: there is no such policy or cluster, or the parts do not fit it.
    """
    from mlsys_core.plugins import installed_plugins
    from mlsys_core.plugins.specs import PolicySpec

    registry = installed_plugins().registry
    placements = {spec.name: spec for spec in registry.all(PolicySpec) if spec.kind == "placement"}
    if executor not in placements:
        hint = ": pip install mlsys-ray" if executor == "ray" else ""
        raise InvalidInputError(f"--executor is {', '.join(['local', *placements])}, not {executor!r}{hint}")
    placer: RankPlacer = registry.part(placements[executor])(model)
    return placer
