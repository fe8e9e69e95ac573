"""Assignment of attention work to kernel programs: pure, once per iteration, shared by all layers.

The queries of a request are cut into *tiles*: some rows of the batch, times the query heads that share a key head,
packed into the fixed number of rows AMX works on. Keys are cut at fixed positions into *splits*. A tile runs
its splits one after the other, or each in a program of its own whose partial results a second kernel merges
(flash-decoding; Dao et al., 2023). Both ways merge the same splits in the same order with the same arithmetic, so a
row's result depends on its own query and keys alone: not on the requests beside it, nor on how its prompt was cut into
chunks. So the planner is free to choose, and splits what has too few tiles to fill a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

SPLIT_KEYS = 512  # enough for a program to be worth its launch, few enough to fill a GPU from one long context
ITEM_FIELDS = 7  # request, row, num_rows, position, first_key, stop_key, partial_row
MERGE_FIELDS = 4  # row, num_visible, partial_row, stride
WRITES_OUT = -1  # an item's partial_row where it needs no merging


@dataclass(frozen=True, slots=True)
class TileShape:
    """Shape of attention's tiles. Owner: the model, for good: another shape rounds differently."""

    num_rows: int  # rows of a tile: a power of two, at least 16 and at least ``group``
    num_keys: int  # keys per step of the inner loop: a power of two, at least 16
    split_keys: int  # keys per split, a multiple of ``num_keys``
    group: int  # query heads per key head

    @property
    def num_queries(self) -> int:
        """Rows of the batch that one tile takes."""
        return self.num_rows // self.group


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The programs of one iteration's attention; those of all key heads do the same."""

    # [num_items, ITEM_FIELDS], longest first. An item is a tile's queries, rows ``row`` to ``row + num_rows - 1`` of
    # the batch, the first of them at ``position`` of its request, against keys ``first_key`` to ``stop_key - 1``.
    # partial_row: where its partial results begin, or WRITES_OUT.
    items: Int32
    # [num_merged, MERGE_FIELDS], one per row of the batch whose splits ran apart. It sees keys 0 to num_visible - 1;
    # the partial result of split s is at partial_row + s * stride.
    merges: Int32
    num_partial_rows: int  # rows of partial results


def tile_shape(*, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int) -> TileShape:
    """Return the tiles for a model's attention.

    The same for prefill and decode, or a prompt's chunks would round differently from its whole. 64 rows are few
    enough that a decode, which fills only ``group`` of them, still waits for memory and not for AMX, and
    as many as a Hopper warpgroup multiplies. fp32 runs without AMX, where unused rows cost.

    Args:
        num_heads: Query heads.
        num_kv_heads: Key heads.
        head_dim: Features per head.
        itemsize: Bytes per feature.

    Example:
        >>> tile_shape(num_heads=32, num_kv_heads=8, head_dim=128, itemsize=2)
        TileShape(num_rows=64, num_keys=64, split_keys=512, group=4)
    """
    group = num_heads // num_kv_heads
    num_rows = 16 if itemsize > 2 else 64 if head_dim <= 128 else 32
    return TileShape(max(num_rows, 1 << (group - 1).bit_length()), 32 if itemsize > 2 else 64, SPLIT_KEYS, group)


def plan_attention(
    query_lens: Sequence[int], context_lens: Sequence[int], tile: TileShape, *, is_causal: bool = True
) -> AttentionPlan:
    """Cut one iteration's attention into programs.

    Args:
        query_lens: [num_requests] rows of each request, at least one; requests stand one after the other.
        context_lens: [num_requests] keys of each request, those of its rows included.
        tile: Shape of the tiles.
        is_causal: A row sees the keys up to its own position; False: all of its request's.

    Example:
        >>> tile = TileShape(num_rows=16, num_keys=16, split_keys=32, group=4)
        >>> plan = plan_attention([6, 1], [6, 40], tile)  # a prompt of 6 tokens, and a decode
        >>> plan.items.tolist()
        [[1, 6, 1, 39, 0, 32, 0], [1, 6, 1, 39, 32, 40, 1], [0, 4, 2, 4, 0, 6, -1], [0, 0, 4, 0, 0, 4, -1]]
        >>> plan.merges.tolist()
        [[6, 40, 0, 1]]
    """
    queries, contexts = np.asarray(query_lens, dtype=np.int64), np.asarray(context_lens, dtype=np.int64)
    num_tiles = -(-queries // tile.num_queries)
    request = np.repeat(np.arange(len(queries)), num_tiles)
    first = _counts_up(num_tiles) * tile.num_queries  # query of the request
    num_rows = np.minimum(tile.num_queries, queries[request] - first)
    row = (np.cumsum(queries) - queries)[request] + first
    position = (contexts - queries)[request] + first
    stop_key = position + num_rows if is_causal else contexts[request]

    num_splits = -(-stop_key // tile.split_keys)
    is_split = (num_tiles[request] == 1) & (num_splits > 1)
    num_partials = np.where(is_split, num_splits * num_rows, 0)
    partial_row = np.cumsum(num_partials) - num_partials

    num_items = np.where(is_split, num_splits, 1)
    of = np.repeat(np.arange(len(request)), num_items)  # the tile of each item
    split = _counts_up(num_items)
    first_key = split * tile.split_keys
    stop = np.where(is_split[of], np.minimum(first_key + tile.split_keys, stop_key[of]), stop_key[of])
    partial = np.where(is_split[of], partial_row[of] + split * num_rows[of], WRITES_OUT)
    items = np.stack((request[of], row[of], num_rows[of], position[of], first_key, stop, partial), axis=1)
    longest_first = np.argsort(first_key - stop, kind="stable")

    merged = np.flatnonzero(is_split)
    of = np.repeat(merged, num_rows[merged])
    inner = _counts_up(num_rows[merged])
    num_visible = position[of] + inner + 1 if is_causal else stop_key[of]
    merges = np.stack((row[of] + inner, num_visible, partial_row[of] + inner, num_rows[of]), axis=1)
    return AttentionPlan(
        items[longest_first].astype(np.int32), merges.astype(np.int32), num_partial_rows=int(num_partials.sum())
    )


def _counts_up(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return 0 to count - 1 for each count, one after the other: ``[2, 3]`` -> ``[0, 1, 0, 1, 2]``."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
