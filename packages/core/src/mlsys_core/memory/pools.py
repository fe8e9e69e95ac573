"""Pools that hand out parts of a memory by number: equal blocks, and runs of adjacent rows.

A pool deals in numbers only; the tensors that they index belong to whoever runs the model. It has no lock: one thread
owns it, such as a scheduler, which calls it in every iteration. :func:`find_pool` finds the core's own and a third
party's alike, by name, once, when an engine is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NewType, NoReturn, Protocol, Self

from mlsys_core.errors import InvalidInputError, MemoryPlanError
from mlsys_core.lazy import resolve

if TYPE_CHECKING:
    from mlsys_core.plugins import Registry


BlockId = NewType("BlockId", int)

MAX_NAMED = 16  # block ids an error message spells out


class OutOfBlocksError(MemoryPlanError):
    """A pool has fewer free blocks than were asked for; nothing was allocated."""

    def __init__(self, wanted: int, free: int, num_blocks: int) -> None:
        super().__init__(
            f"{wanted} blocks wanted, {free} of {num_blocks} are free: release some (finish or preempt a request) "
            f"or make the pool larger"
        )
        self.wanted = wanted
        self.free = free


class BlockPool:
    """``num_blocks`` blocks, each free or held by one or more references.

    Blocks are handed out last released, first reused: such a block is likely to be in a cache still.

    Args:
        num_blocks: blocks in the pool, 1 or more; their ids are ``0 .. num_blocks - 1``.

    Raises:
        InvalidInputError: ``num_blocks`` is less than 1.

    Example:
        >>> pool = BlockPool(4)
        >>> prompt = pool.allocate(2)
        >>> pool.retain(prompt)  # a second sequence shares the prompt's blocks
        >>> pool.release(prompt)
        >>> pool.num_free
        2
        >>> pool.release(prompt)
        >>> pool.close()  # nothing is held: no leak
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise InvalidInputError(f"num_blocks is {num_blocks}: a pool needs at least 1 block")
        self._num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free = [BlockId(i) for i in reversed(range(num_blocks))]  # a stack; its top is next
        self._closed = False

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, free or not."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    def ref_count(self, block: BlockId) -> int:
        """Return the references to ``block``; 0 if it is free.

        Raises:
            MemoryPlanError: ``block`` is not of this pool.
        """
        if not 0 <= block < self._num_blocks:
            self._refuse(block, "looked up")
        return self._ref_counts[block]

    def allocate(self, n: int) -> list[BlockId]:
        """Take ``n`` free blocks, with one reference each: all of them or none.

        Raises:
            OutOfBlocksError: fewer than ``n`` are free; it has the numbers as ``wanted`` and ``free``.
            InvalidInputError: ``n`` is negative.
            MemoryPlanError: the pool is closed.
        """
        blocks = self.try_allocate(n)
        if blocks is None:
            raise OutOfBlocksError(n, len(self._free), self._num_blocks)
        return blocks

    def try_allocate(self, n: int) -> list[BlockId] | None:
        """Allocate like :meth:`allocate`, but return None if fewer than ``n`` blocks are free."""
        free = self._free
        if n == 1 and free:  # a decode step adds one block to a sequence
            block = free.pop()
            self._ref_counts[block] = 1
            return [block]
        if n < 0:
            raise InvalidInputError(f"{n} blocks wanted: ask for 0 or more")
        if self._closed:
            raise MemoryPlanError("this block pool is closed: allocate from it before close(), or make a new one")
        if n > len(free):
            return None
        blocks = free[: -n - 1 : -1]
        del free[len(free) - n :]
        ref_counts = self._ref_counts
        for block in blocks:
            ref_counts[block] = 1
        return blocks

    def retain(self, blocks: Sequence[BlockId]) -> None:
        """Add one reference to each of ``blocks``; a block named twice gets two. All of them or none.

        Raises:
            MemoryPlanError: a block is free, or not of this pool.
        """
        ref_counts, num_blocks = self._ref_counts, self._num_blocks
        for block in blocks:
            if not 0 <= block < num_blocks or not ref_counts[block]:
                self._refuse(block, "retained")
        for block in blocks:
            ref_counts[block] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop one reference to each of ``blocks``; those with none left are free. All of them or none.

        Raises:
            MemoryPlanError: a block is free already (a double free), or not of this pool.
        """
        ref_counts, num_blocks, free = self._ref_counts, self._num_blocks, self._free
        num_free = len(free)
        for done, block in enumerate(blocks):
            if not 0 <= block < num_blocks or not ref_counts[block]:
                for earlier in blocks[:done]:
                    ref_counts[earlier] += 1
                del free[num_free:]
                self._refuse(block, "released")
            count = ref_counts[block] - 1
            ref_counts[block] = count
            if not count:
                free.append(block)

    def check_leaks(self, expected_live: Iterable[BlockId] = ()) -> None:
        """Check that exactly the blocks ``expected_live`` are held.

        Raises:
            MemoryPlanError: others are held (leaked), or some of these are not; the message lists them.
        """
        expected = set(expected_live)
        live = {block for block, count in enumerate(self._ref_counts) if count}
        if leaked := sorted(live - expected):
            raise MemoryPlanError(f"{_named(leaked)} leaked: release each once per allocate() and retain()")
        if missing := sorted(expected - live):
            raise MemoryPlanError(f"{_named(missing)} should be held but not: something released one too many times")

    def close(self) -> None:
        """Check that nothing is held and close the pool; idempotent. On a leak the pool stays open, to be examined.

        Raises:
            MemoryPlanError: blocks are still held; the message lists them.
        """
        if not self._closed:
            self.check_leaks()
            self._closed = True
            self._free = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:  # otherwise the leak is a consequence, and would hide its cause
            self.close()

    def _refuse(self, block: BlockId, verb: str) -> NoReturn:
        if not 0 <= block < self._num_blocks:
            raise MemoryPlanError(
                f"block {block} {verb}, which is not of this pool: its ids are 0 to {self._num_blocks - 1}"
            )
        if verb == "released":
            raise MemoryPlanError(
                f"block {block} released more often than it was held (a double free): nothing changed"
            )
        raise MemoryPlanError(f"block {block} {verb} while it is free: retain only what is held; nothing changed")


def _named(blocks: Sequence[int]) -> str:
    names = ", ".join(map(str, blocks[:MAX_NAMED]))
    more = f" and {len(blocks) - MAX_NAMED} more" if len(blocks) > MAX_NAMED else ""
    return f"{len(blocks)} block{'s' if len(blocks) > 1 else ''} ({names}{more})"


class RunPool:
    """Hands out runs of numbers, each a power of two long; freed ones are kept by size and used again.

    So nothing fragments, and at most half of a run is idle.

    Args:
        first: the smallest number handed out.
        capacity: numbers from ``first`` up to here; None for no bound.

    Example:
        >>> runs = RunPool(1, 9)
        >>> runs.take(3), runs.take(4), runs.take(1)
        (1, 5, None)
        >>> runs.give_back(1, 3)
        >>> runs.take(4)
        1
    """

    def __init__(self, first: int = 0, capacity: int | None = None) -> None:
        if capacity is not None and capacity <= first:
            raise InvalidInputError(f"no numbers from {first} to {capacity}: the capacity must be above the first")
        self._first = first
        self._capacity = capacity
        self._top = first
        self._free: dict[int, list[int]] = {}
        self.num_used = 0  # numbers in runs handed out

    @property
    def top(self) -> int:
        """One above the largest number ever handed out."""
        return self._top

    def fits(self, count: int) -> bool:
        """Return whether ``count`` adjacent numbers would be available if all were free."""
        return self._capacity is None or _rounded(count) <= self._capacity - self._first

    def take(self, count: int) -> int | None:
        """Return the first of ``count`` numbers in a row; None if there is no room now. A count of 0 takes nothing."""
        if count == 0:
            return self._first
        size = _rounded(count)
        free = self._free.get(size)
        if free:
            start = free.pop()
        elif self._capacity is None or self._top + size <= self._capacity:
            start = self._top
            self._top += size
        else:
            start_or_none = self._split(size)
            if start_or_none is None:
                return None
            start = start_or_none
        self.num_used += size
        return start

    def give_back(self, start: int, count: int) -> None:
        """Return a run that :meth:`take` gave for ``count``."""
        if count == 0:
            return
        size = _rounded(count)
        self._free.setdefault(size, []).append(start)
        self.num_used -= size
        if self.num_used == 0:  # nobody holds anything: begin anew, so that no pattern of sizes can wedge it
            self._free.clear()
            self._top = self._first

    def _split(self, size: int) -> int | None:
        """Return a run of ``size`` cut from the smallest larger free one."""
        larger = min((other for other, free in self._free.items() if other > size and free), default=None)
        if larger is None:
            return None
        start = self._free[larger].pop()
        while larger > size:
            larger //= 2
            self._free.setdefault(larger, []).append(start + larger)
        return start


def _rounded(count: int) -> int:
    return 1 << (count - 1).bit_length()


DEFAULT_POOLS = {"blocks": BlockPool, "runs": RunPool}  # the core's own of each kind, for who names none


def find_pool(
    name: str | None, kind: Literal["blocks", "runs"], registry: Registry | None = None
) -> Callable[..., Any]:
    """Return the factory of the pool called ``name``; None: the core's own of that kind.

    Args:
        name: as registered.
        kind: ``"blocks"``: the factory takes the number of blocks and gives :class:`~mlsys_core.memory.Blocks`;
            ``"runs"``: it takes the first number and one above the last, and gives :class:`~mlsys_core.memory.Runs`.
        registry: registry to look it up in; None: that of the installed plugins.

    Raises:
        InvalidInputError: there is none of that name and kind; the message lists the names.
        PluginError: a plugin's factory fails by a mistake of its own (when it is called).

    Example:
        >>> find_pool("block", "blocks")(4).num_free
        4
    """
    if name is None:
        return DEFAULT_POOLS[kind]
    from mlsys_core.plugins import installed_plugins
    from mlsys_core.plugins.registry import failing_as
    from mlsys_core.plugins.specs import MemoryPoolSpec

    found = installed_plugins().registry if registry is None else registry
    spec = found.chosen(MemoryPoolSpec, name)
    if spec.kind != kind:
        fitting = ", ".join(sorted(each.name for each in found.all(MemoryPoolSpec) if each.kind == kind))
        raise InvalidInputError(f"memory pool {name!r} hands out {spec.kind}; this takes pools of {kind}: {fitting}")
    factory: Callable[..., Any] = resolve(spec.factory)

    def make(*sizes: int) -> Any:
        with failing_as(spec, found):
            return factory(*sizes)

    return make


class Blocks(Protocol):
    """A pool of equal blocks, each free or held by one or more references; Orca's K/V cache is cut into them."""

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated now."""
        ...

    def ref_count(self, block: BlockId) -> int:
        """Return the references to ``block``; 0 if it is free."""
        ...

    def allocate(self, n: int) -> list[BlockId]:
        """Take ``n`` free blocks, with one reference each: all of them or none.

        Raises:
            OutOfBlocksError: fewer are free.
        """
        ...

    def retain(self, blocks: Sequence[BlockId]) -> None:
        """Add one reference to each of ``blocks``."""
        ...

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop one reference to each of ``blocks``; those with none left are free."""
        ...


class Runs(Protocol):
    """A pool of numbers handed out in runs of adjacent ones, such as BatchMaker's state rows."""

    def fits(self, count: int) -> bool:
        """Return whether ``count`` adjacent numbers would be available if all were free."""
        ...

    def take(self, count: int) -> int | None:
        """Return the first of ``count`` adjacent numbers; None if there is no room now. A count of 0 takes nothing."""
        ...

    def give_back(self, start: int, count: int) -> None:
        """Return a run that :meth:`take` gave for ``count``."""
        ...
