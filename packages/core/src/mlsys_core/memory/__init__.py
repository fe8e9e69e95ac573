"""Memory: plans of offsets (pure), the arena that holds one, pools of numbers; see docs/memory.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlsys_core.lazy import lazy_exports
from mlsys_core.memory.block_pool import BlockId, BlockPool, OutOfBlocksError
from mlsys_core.memory.pools import Blocks, Runs, find_pool
from mlsys_core.memory.run_pool import RunPool

if TYPE_CHECKING:
    from mlsys_core.memory.arena import Arena
    from mlsys_core.memory.plan import Lifetime, MemoryPlan, plan_offsets, plan_offsets_for_conflicts

__all__ = [
    "Arena",
    "BlockId",
    "BlockPool",
    "Blocks",
    "Lifetime",
    "MemoryPlan",
    "OutOfBlocksError",
    "RunPool",
    "Runs",
    "find_pool",
    "plan_offsets",
    "plan_offsets_for_conflicts",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "arena": ["Arena"],
        "plan": ["Lifetime", "MemoryPlan", "plan_offsets", "plan_offsets_for_conflicts"],
    },
)
