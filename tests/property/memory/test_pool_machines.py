"""BlockPool against a model too simple to be wrong, under any sequence of calls Hypothesis finds."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mlsys_core.errors import MemoryPlanError
from mlsys_core.memory import BlockId, BlockPool, OutOfBlocksError


class BlockPoolMachine(RuleBasedStateMachine):
    """The model is a count of references per held block, and the free blocks as a stack."""

    @initialize(num_blocks=st.integers(1, 12))
    def make(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.pool = BlockPool(num_blocks)
        self.refs: Counter[int] = Counter()
        self.stack = list(reversed(range(num_blocks)))

    def drop(self, block: int) -> None:
        self.refs[block] -= 1
        if not self.refs[block]:
            del self.refs[block]
            self.stack.append(block)

    def drawn(self, data: st.DataObject) -> list[BlockId]:
        """Any blocks, held or not, the same ones repeatedly, now and then one that does not exist."""
        ids = st.integers(0, self.num_blocks - 1) | st.sampled_from([-1, self.num_blocks])
        held = st.sampled_from(sorted(self.refs)) if self.refs else ids
        return [BlockId(i) for i in data.draw(st.lists(held | held | ids, max_size=6))]

    @rule(n=st.integers(0, 13))
    def allocate(self, n: int) -> None:
        if n > len(self.stack):
            with pytest.raises(OutOfBlocksError) as caught:
                self.pool.allocate(n)
            assert (caught.value.wanted, caught.value.free) == (n, len(self.stack))
            return
        blocks = self.pool.allocate(n)
        assert blocks == [self.stack.pop() for _ in range(n)]
        self.refs.update(blocks)

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        blocks = self.drawn(data)
        if all(block in self.refs for block in blocks):
            self.pool.retain(blocks)
            self.refs.update(blocks)
        else:
            with pytest.raises(MemoryPlanError, match=r"block -?\d+ retained while it is free|not of this pool"):
                self.pool.retain(blocks)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.drawn(data)
        if all(self.refs[block] >= count for block, count in Counter(blocks).items()):
            self.pool.release(blocks)
            for block in blocks:
                self.drop(block)
        else:
            with pytest.raises(MemoryPlanError, match=r"block -?\d+ released more often.*double free|not of this pool"):
                self.pool.release(blocks)

    @precondition(lambda self: self.refs)
    @rule()
    def a_leak_is_noticed(self) -> None:
        with pytest.raises(MemoryPlanError, match="leaked"):
            self.pool.close()

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "pool"):  # before make()
            return
        assert self.pool.num_free == len(self.stack)
        assert [self.pool.ref_count(BlockId(i)) for i in range(self.num_blocks)] == [
            self.refs[i] for i in range(self.num_blocks)
        ]
        if self.refs:
            with pytest.raises(MemoryPlanError, match=f"^{len(self.refs)} block"):
                self.pool.close()

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for block in list(self.refs.elements()):
                self.pool.release([BlockId(block)])
            self.pool.close()


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=50, stateful_step_count=30)
