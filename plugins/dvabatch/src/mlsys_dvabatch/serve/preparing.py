"""Turn the options of ``mlsys dvabatch serve`` and ``profile``, and of services, into models, costs and policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import Scheduler
from mlsys_core.plugins import installed_plugins
from mlsys_core.plugins.specs import PolicySpec
from mlsys_dvabatch.engine import NO_EXITS
from mlsys_dvabatch.scheduling.costs import StageCosts
from mlsys_dvabatch.scheduling.policies.base import Policy
from mlsys_dvabatch.scheduling.policies.input import InputPolicy
from mlsys_dvabatch.scheduling.policies.load import LoadPolicy
from mlsys_dvabatch.scheduling.policies.registry import WHOLE, Diversities, choose, comp_wait_s, make_policy
from mlsys_dvabatch.stages.model import Packable
from mlsys_dvabatch.stages.profile import (
    SHARERS,
    StoredProfile,
    packed_units,
    profile_operators,
    profile_stages,
    stored_costs,
)
from mlsys_dvabatch.stages.slicing.program import naming
from mlsys_dvabatch.stages.slicing.sized import SizedModel
from mlsys_dvabatch.stages.zoo import DEFAULTS, Loaded, Loading, load

_EXIT_CONFIDENCE = 0.9  # default of early exits


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model with its costs and policy."""

    loaded: Loaded
    costs: StageCosts
    policy: Policy | Scheduler[Any, Any, Any]
    policy_name: str
    profile: StoredProfile | None = None  # the file of the costs; None: they are of no file


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """Options of a model's policy.

    Raises:
        InvalidInputError: There is no such mode.
    """

    policy: str = "auto"
    mode: str = "cost-aware"  # or "literal"
    qos_s: float = 0.2  # latency target
    max_batch_size: int = 64  # requests
    max_waiting: int = 1024  # requests
    window_s: float = 0.005  # window of the policy "delay"
    num_stages: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("literal", "cost-aware"):
            raise InvalidInputError(f"mode {self.mode!r}: give literal or cost-aware")


def prepare(
    name: str,
    cache_dir: Path,
    batching: Batching = Batching(),
    loading: Loading = DEFAULTS,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Prepared:
    """Load a model, profile it unless that was done before, and make its policy.

    Args:
        name: See :func:`~mlsys_dvabatch.stages.zoo.load`.
        cache_dir: Folder of models and profiles.
        batching: Options of the policy; its number of stages and its early exits are those of loading too.
        loading: Options of loading.
        progress: Called as ``progress(done, total)`` while profiling.

    Raises:
        InvalidInputError: no such model, one that mixes requests, or options that do not go together.
        PluginError: a policy or compiler that cannot be loaded.
    """
    given = _EXIT_CONFIDENCE if loading.exit_confidence is None else loading.exit_confidence
    loading = replace(
        loading, num_stages=batching.num_stages, exit_confidence=given if batching.policy == "early-exit" else None
    )
    with naming(name):
        loaded = load(name, cache_dir, loading)
        return prepare_loaded(loaded, cache_dir, batching, progress=progress)


def prepare_loaded(
    loaded: Loaded,
    cache_dir: Path,
    batching: Batching = Batching(),
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Prepared:
    """Profile a loaded model unless that was done before, and make its policy. Raises as :func:`prepare`."""
    name, policy, max_batch_size = loaded.name, batching.policy, batching.max_batch_size
    loaded.model.isolation.require(max_batch_size)
    packable = loaded.model if isinstance(loaded.model, Packable) else None
    if packable is not None and packable.needs_packing and policy not in ("auto", "packed"):
        raise InvalidInputError(f"{name}: {packable.needs_packing} is for packed batches: give --policy packed")
    if policy in WHOLE:  # these ask for no costs
        profile = profiled(loaded, cache_dir, max_batch_size=1, progress=progress)
        return Prepared(loaded, profile.costs, _whole(batching), policy)
    chosen = policy
    if policy == "auto":
        has_lengths = packable is not None or isinstance(loaded.model, SizedModel)
        has_operators = not has_lengths and _has_operator_diversity(loaded)
        chosen = choose(Diversities(has_lengths, has_operators), can_pack=packable is not None)
    made = make_policy(chosen, installed_plugins().registry, mode=batching.mode)
    if made.wants_exits and not loaded.has_exits:
        raise InvalidInputError(f"{name}: {NO_EXITS}")
    if chosen == "packed":
        if packable is None:
            raise InvalidInputError(f"{name}: only encoders can be packed; take another policy")
        packed: Any = packable.with_form(is_packed=True, num_stages=batching.num_stages or 1)
        loaded = replace(loaded, model=packed)
    profile = profiled(loaded, cache_dir, max_batch_size=max_batch_size, progress=progress)
    costs = profile.costs
    if isinstance(made, LoadPolicy):
        made.comp_wait_s = comp_wait_s(costs, batching.qos_s, max_batch_size, loaded.lengths[-1])
        made.qos_s = batching.qos_s
    if isinstance(made, InputPolicy) and isinstance(loaded.model, SizedModel):
        made.group_of = loaded.model.group_of
    return Prepared(loaded, costs, made, chosen, profile)


def profiled(
    loaded: Loaded, cache_dir: Path, *, max_batch_size: int = 64, progress: Callable[[int, int], None] | None = None
) -> StoredProfile:
    """Return the costs of a model's stages, from disk or measured now."""
    sizes = [2**power for power in range(7) if 2**power <= max_batch_size]
    packable = loaded.model if isinstance(loaded.model, Packable) else None
    is_packed = packable is not None and packable.is_packed
    if is_packed:
        sizes = list(SHARERS)
    elif packable is not None or len(loaded.lengths) > 1:  # batches of many long requests take long and say nothing new
        sizes = [size for size in sizes if size <= 8]
    lengths = packed_units(loaded.lengths) if is_packed else loaded.lengths
    name = loaded.name + (packable.form if packable is not None else "")
    return stored_costs(
        cache_dir,
        f"{name}, sizes {sizes}",
        loaded.model,
        lengths,
        lambda: profile_stages(
            loaded.model,
            loaded.request,
            batch_sizes=sizes,
            lengths=lengths,
            longest=loaded.lengths[-1],
            repeats=5 if isinstance(loaded.model, SizedModel) else 3,
            keep=min,
            progress=progress,
            device=loaded.device,
            is_packed=is_packed,
        ),
        device=loaded.device,
        is_packed=is_packed,
    )


def _has_operator_diversity(loaded: Loaded) -> bool:
    model: Any = loaded.model  # a program
    with torch.inference_mode():
        return profile_operators(model.program, batch_sizes=(1, 4, 16)).prefers_differently()


def _whole(batching: Batching) -> Scheduler[Any, Any, Any]:
    name = batching.policy
    factory = installed_plugins().registry.load(PolicySpec, WHOLE[name])
    size = {"batch_size" if name == "static" else "max_batch_size": batching.max_batch_size}
    window = {"delay_s": batching.window_s} if name == "delay" else {}
    scheduler: Scheduler[Any, Any, Any] = factory(**size, **window, max_waiting=batching.max_waiting)
    return scheduler
