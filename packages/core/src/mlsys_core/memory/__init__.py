"""Memory: plans of offsets (pure), the arena that holds one, pools of numbers; see docs/memory.md."""

from __future__ import annotations

from mlsys_core.memory.arena import Arena
from mlsys_core.memory.block_pool import BlockId, BlockPool, OutOfBlocksError
from mlsys_core.memory.plan import Lifetime, MemoryPlan, plan_offsets, plan_offsets_for_conflicts
from mlsys_core.memory.pools import Blocks, Runs, find_pool
from mlsys_core.memory.run_pool import RunPool

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
