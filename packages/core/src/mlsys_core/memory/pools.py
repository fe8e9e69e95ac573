"""Memory pools by name: the core's own and a third party's alike. Called once, when an engine is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from mlsys_core.errors import InvalidInputError
from mlsys_core.memory.block_pool import BlockId, BlockPool
from mlsys_core.memory.run_pool import RunPool

if TYPE_CHECKING:
    from mlsys_core.plugins import Registry


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
    from mlsys_core.plugins.specs import MemoryPoolSpec

    found = installed_plugins().registry if registry is None else registry
    spec = found.chosen(MemoryPoolSpec, name)
    if spec.kind != kind:
        fitting = ", ".join(sorted(each.name for each in found.all(MemoryPoolSpec) if each.kind == kind))
        raise InvalidInputError(f"memory pool {name!r} hands out {spec.kind}; this takes pools of {kind}: {fitting}")
    factory: Callable[..., Any] = found.part(spec)
    return factory


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
