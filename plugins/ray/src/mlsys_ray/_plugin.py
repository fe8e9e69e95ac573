"""Register mlsys-ray with mlsys; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import PolicySpec


@hookimpl
def mlsys_register_policies() -> Iterable[PolicySpec]:
    """Return the placement of a divided model's ranks by Ray, ``mlsys orca serve --executor ray``."""
    about = "Parts of a model on the nodes of a Ray cluster."
    return [PolicySpec(name="ray", kind="placement", help=about, factory="mlsys_ray.placement:place_ranks")]
