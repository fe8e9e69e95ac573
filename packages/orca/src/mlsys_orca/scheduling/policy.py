"""Scheduling policies by name, from the plugin registry: Orca's own and a third party's alike.

The engine asks once, at its start. What a policy must be:

- its factory takes a :class:`~mlsys_orca.scheduling.block_tables.BlockTables`, which it owns from then on, and the
  keywords ``max_batch_size`` and ``max_model_len``; further keywords of its own, with defaults, are its options;
- what it returns is a :class:`GenerationScheduler`;
- that hands a request's tokens to the runner in order of position, each once computed before the next is sampled, and
  frees the request's blocks when it leaves. Of a request whose first ``num_encoder_tokens`` an encoder reads, it hands
  over all of those and one more in the first iteration, and shares no block.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

from mlsys_core.errors import InvalidInputError, PluginError
from mlsys_core.loop import Scheduler
from mlsys_core.plugins import Registry
from mlsys_core.plugins.specs import PolicySpec

from mlsys_orca.scheduling.batch import GenerationRequest, IterationBatch, IterationOutput
from mlsys_orca.scheduling.block_tables import BlockTables

DEFAULT_POLICY = "orca"

GenerationScheduler: TypeAlias = Scheduler[GenerationRequest, IterationBatch, IterationOutput]
"""Its results are :class:`~mlsys_orca.scheduling.batch.GenerationResult`. An attribute ``streams_tokens = False``
says that fronts get a request's tokens with its result only, and not as iterations complete. An attribute ``pool``, a
:class:`~mlsys_orca.scheduling.request_pool.RequestPool`, is read for metrics and benchmarks. An attribute
``restores_blocks = True`` beside it says that requests may come with K/V blocks that another engine has filled, and
that no request runs which :meth:`~mlsys_orca.scheduling.request_pool.RequestPool.may_run` denies."""


class PolicyFactory(Protocol):
    """Factory that ``PolicySpec.factory`` of a scheduling policy names."""

    def __call__(
        self, block_tables: BlockTables, *, max_batch_size: int, max_model_len: int, **options: Any
    ) -> GenerationScheduler:
        """Make a scheduler, the only owner of ``block_tables``."""
        ...


def find_policy(name: str, registry: Registry) -> PolicySpec:
    """Return the scheduling policy called ``name``.

    Raises:
        InvalidInputError: there is none; the message lists what there is and which plugins could not be loaded.
    """
    policies = {spec.name: spec for spec in registry.all(PolicySpec) if spec.kind == "scheduling"}
    if name in policies:
        return policies[name]
    raise InvalidInputError(registry.why_unknown("scheduling policy", name, policies))


def make_scheduler(
    name: str,
    registry: Registry,
    *,
    block_tables: BlockTables,
    max_batch_size: int,
    max_model_len: int,
    options: Mapping[str, Any] | None = None,
) -> GenerationScheduler:
    """Make a scheduler of the policy called ``name``.

    Args:
        name: Name in the registry.
        registry: Where it is looked up.
        block_tables: The K/V blocks; the scheduler is their only owner.
        max_batch_size: Requests per iteration at most.
        max_model_len: Tokens a request may have in all, prompt and answer.
        options: Further keywords of the policy's own.

    Raises:
        InvalidInputError: there is no such policy, it has no such option, or it refuses a value.
        PluginError: it cannot be loaded, or its factory does not take what every policy must.

    Example:
        >>> from mlsys_core.plugins import installed_plugins
        >>> tables = BlockTables(num_blocks=64)
        >>> limits = {"block_tables": tables, "max_batch_size": 8, "max_model_len": 512}
        >>> make_scheduler("paged", installed_plugins().registry, **limits, options={"watermark": 0.1}).num_unfinished
        0
    """
    find_policy(name, registry)
    factory: PolicyFactory = registry.load(PolicySpec, name)
    limits = {"max_batch_size": max_batch_size, "max_model_len": max_model_len}
    signature = inspect.signature(factory)
    try:
        signature.bind(block_tables, **limits, **(options or {}))
    except TypeError as error:
        keywords = [each.name for each in signature.parameters.values() if each.kind is each.KEYWORD_ONLY]
        own = sorted(set(keywords) - set(limits))
        if unknown := sorted(set(options or {}) - set(own)):
            raise InvalidInputError(
                f"scheduling policy {name!r} has no option {unknown[0]!r} (it has: {', '.join(own) or 'none'})"
            ) from error
        raise PluginError(
            f"scheduling policy {name!r} cannot be made: {error}; its factory must take the block tables and the "
            f"keywords {', '.join(limits)}, and no other without a default"
        ) from error
    return factory(block_tables, **limits, **(options or {}))
