"""Policies by name: those of this package and of third parties alike, and the automatic choice (section 7.1)."""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mlsys_core.errors import InvalidInputError, PluginError
from mlsys_core.plugins import Registry
from mlsys_core.plugins.specs import PolicySpec

from mlsys_dvabatch.scheduling.costs import StageCosts, remaining_s
from mlsys_dvabatch.scheduling.policies.base import Policy

# Core's baselines, by their registered names: the whole model runs a batch at once.
WHOLE = {"zero": "zero-batch", "delay": "delay-batch", "static": "static-batch"}
PREFIX = "dvabatch-"


@dataclass(frozen=True, slots=True)
class Diversities:
    """Diversities found between requests or within the model; every model has load diversity."""

    input: bool  # requests have different lengths
    operator: bool  # operators prefer different batch sizes


def policy_names(registry: Registry) -> list[str]:
    """Return the names that :func:`make_policy` takes, besides ``"auto"``."""
    return sorted(s.name.removeprefix(PREFIX) for s in registry.all(PolicySpec) if s.name.startswith(PREFIX))


def make_policy(name: str, registry: Registry, **options: Any) -> Policy:
    """Make the policy called ``name``, registered as ``dvabatch-NAME``.

    Raises:
        InvalidInputError: there is none, or it does not take these options.
        PluginError: it cannot be loaded, or is no policy.
    """
    try:
        registry.chosen(PolicySpec, PREFIX + name)
    except InvalidInputError as error:
        raise InvalidInputError(
            f"no DVABatch policy is called {name!r}; there are: auto, {', '.join(policy_names(registry))}, and the "
            f"baselines {', '.join(WHOLE)}"
        ) from error
    factory = registry.load(PolicySpec, PREFIX + name)
    try:
        with suppress(ValueError):  # a class of C code may tell no signature
            inspect.signature(factory).bind(**options)
    except TypeError as error:
        raise InvalidInputError(f"policy {name!r} does not take {sorted(options)}: {error}") from error
    policy = factory(**options)
    if not isinstance(policy, Policy):
        raise PluginError(f"policy {name!r}: its factory gave a {type(policy).__name__}, not a Policy")
    return policy


def choose(diversities: Diversities, *, can_pack: bool) -> str:
    """Choose the policy for a model: input diversity comes before operator diversity (section 4.2).

    Where the model can do without padding that beats every way of padding, so it comes first of all.
    """
    if diversities.input:
        return "packed" if can_pack else "input"
    return "load-operator" if diversities.operator else "load"


def comp_wait_s(costs: StageCosts, qos_s: float, max_batch_size: int, length: int = 1) -> float:
    """Return T_comp_wait: the age at which a batch may still be stretched while requests stay within ``qos_s``.

    It is the target less a full batch's own time and the catch-up of one as large.
    """
    return max(0.0, qos_s - 2 * remaining_s(costs, 0, max_batch_size, length))
