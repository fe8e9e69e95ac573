"""Sums of engines' numbers: over replicas, and over the workers that a replica has had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from mlsys_orca.engine.client import EngineCounts, PoolCounts

NOTHING = EngineCounts(num_blocks=0, num_free_blocks=0, pool=None)


def summed(parts: Sequence[EngineCounts]) -> EngineCounts:
    """Return the sums of all numbers; a part without a pool adds none to the pools'.

    Example:
        >>> part = EngineCounts(num_blocks=4, num_free_blocks=1, pool=None)
        >>> summed([part, part])
        EngineCounts(num_blocks=8, num_free_blocks=2, pool=None)
    """
    pools = [part.pool for part in parts if part.pool is not None]
    names = [field.name for field in fields(PoolCounts)]
    return EngineCounts(
        num_blocks=sum(part.num_blocks for part in parts),
        num_free_blocks=sum(part.num_free_blocks for part in parts),
        pool=PoolCounts(**{name: sum(getattr(pool, name) for pool in pools) for name in names}) if pools else None,
    )


def history(counts: EngineCounts) -> EngineCounts:
    """Return what stays true of an engine that has ended: its totals since its start."""
    pool = counts.pool
    return replace(NOTHING, pool=None if pool is None else replace(pool, num_running=0, num_unfinished=0))
