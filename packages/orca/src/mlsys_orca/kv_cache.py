"""Where attention's keys and values live between iterations (ORCA's Attention K/V manager, section 3.2).

Two halves, on the two sides of the scheduler-runner boundary. :class:`BlockTables` is pure bookkeeping, owned by the
scheduler: it gives each request its blocks when the request is first scheduled, all that it may ever need (ORCA,
section 4.2: reserving ``max_tokens`` slots at once rules out deadlock), and takes them back exactly once.
:class:`KVCache` owns the tensors, on the runner's side, and knows slots only. A *slot* holds one token's key and value
in every layer; a *block* is ``block_size`` adjacent slots. Block ids cross with each batch, so the two halves never
talk otherwise.

Imports no torch by itself: a scheduler can use :class:`BlockTables` without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlsys_core.errors import InvalidInputError, MemoryPlanError
from mlsys_core.memory import BlockId, BlockPool

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mlsys_orca.models.config import ModelConfig

DEFAULT_BLOCK_SIZE = 16  # tokens


class BlockTables:
    """Which K/V blocks are whose.

    Args:
        num_blocks: Blocks there are.
        block_size: Tokens per block.

    Example:
        >>> tables = BlockTables(num_blocks=4, block_size=16)
        >>> tables.reserve("a", num_tokens=40)
        (0, 1, 2)
        >>> tables.can_reserve(17)
        False
        >>> tables.free("a")
        >>> tables.num_free_blocks
        4
    """

    def __init__(self, *, num_blocks: int, block_size: int = DEFAULT_BLOCK_SIZE) -> None:
        if block_size < 1:
            raise InvalidInputError(f"blocks of {block_size} tokens hold nothing; the size must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._tables: dict[str, tuple[BlockId, ...]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks no request holds."""
        return self._pool.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.block_size)

    def can_reserve(self, num_tokens: int) -> bool:
        """Whether :meth:`reserve` would succeed now."""
        return self.num_blocks_for(num_tokens) <= self.num_free_blocks

    def reserve(self, request_id: str, num_tokens: int) -> tuple[int, ...]:
        """Give a request blocks for ``num_tokens`` tokens: its prompt and all it may generate.

        In rising order, so that tables are runs of adjacent blocks while the cache is not crowded; a run is read as a
        view, other tables are gathered.

        Raises:
            InvalidInputError: ``num_tokens`` is less than 1.
            MemoryPlanError: the request has blocks already, or too few are free (ask :meth:`can_reserve` first).
        """
        if request_id in self._tables:
            raise MemoryPlanError(f"request {request_id!r} has its K/V blocks already; free them first")
        if num_tokens < 1:
            raise InvalidInputError(f"request {request_id!r} reserves {num_tokens} tokens; it must be at least 1")
        table = self._tables[request_id] = tuple(sorted(self._pool.allocate(self.num_blocks_for(num_tokens))))
        return table

    def free(self, request_id: str) -> None:
        """Take a request's blocks back.

        Raises:
            MemoryPlanError: the request has none: never reserved, or freed before.
        """
        if request_id not in self._tables:
            raise MemoryPlanError(f"request {request_id!r} has no K/V blocks to free: never reserved, or freed before")
        # Last block first: the pool hands out what came back last, so the next table is a rising run again.
        self._pool.release(self._tables.pop(request_id)[::-1])


def slots_of(block_table: tuple[int, ...], start: int, stop: int, *, block_size: int) -> range | list[int]:
    """The slots of positions ``start`` to ``stop - 1`` of a request; a range where they are adjacent.

    Raises:
        MemoryPlanError: the table is too short for ``stop`` tokens.

    Example:
        >>> slots_of((4, 5), 0, 6, block_size=4), slots_of((4, 9), 3, 6, block_size=4)
        (range(16, 22), [19, 36, 37])
    """
    first, last = start // block_size, -(-stop // block_size)
    blocks = block_table[first:last]
    if len(blocks) < last - first:
        raise MemoryPlanError(f"{len(block_table)} K/V blocks of {block_size} do not hold {stop} tokens")
    if blocks == tuple(range(blocks[0], blocks[0] + len(blocks))):
        shift = (blocks[0] - first) * block_size
        return range(start + shift, stop + shift)
    return [block_table[position // block_size] * block_size + position % block_size for position in range(start, stop)]


class KVCache:
    """Keys and values of all layers.

    Args:
        config: The model's shape.
        num_blocks: As the scheduler's :class:`BlockTables`.
        block_size: As the scheduler's :class:`BlockTables`.
        dtype: As the model's.
        device: As the model's.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int = DEFAULT_BLOCK_SIZE,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        import torch

        self.num_blocks = num_blocks
        self.block_size = block_size
        # Not zeroed: attention reads only what write() has written, and an untouched page costs no memory on Linux.
        shape = (2, config.num_layers, num_blocks * block_size, config.num_kv_heads, config.head_dim)
        self._keys, self._values = torch.empty(shape, dtype=dtype, device=device).unbind(0)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return self._keys.nbytes + self._values.nbytes

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store this iteration's keys and values and return all of the layer's.

        Args:
            layer: The layer's number.
            slots: [num_tokens] int64, where each row goes.
            key: [num_tokens, num_kv_heads, head_dim], rotated.
            value: As ``key``.

        Returns:
            The layer's keys and values, each [num_slots, num_kv_heads, head_dim].
        """
        keys, values = self._keys[layer], self._values[layer]
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)
        return keys, values


def kv_nbytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that one token's keys and values take in all layers: what a memory budget divides by."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
