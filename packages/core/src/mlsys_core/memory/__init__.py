"""Memory: plans of offsets (pure), the arena that holds one, pools of blocks, budgets of slots; see docs/memory.md."""

from __future__ import annotations

from mlsys_core.memory.arena import Arena
from mlsys_core.memory.block_pool import BlockId, BlockPool, OutOfBlocksError
from mlsys_core.memory.conflicts import plan_offsets_for_conflicts
from mlsys_core.memory.plan import Lifetime, MemoryPlan, plan_offsets
from mlsys_core.memory.slots import SlotBudget

__all__ = [
    "Arena",
    "BlockId",
    "BlockPool",
    "Lifetime",
    "MemoryPlan",
    "OutOfBlocksError",
    "SlotBudget",
    "plan_offsets",
    "plan_offsets_for_conflicts",
]
