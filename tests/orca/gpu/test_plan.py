from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_orca.backends.triton.plan import WRITES_OUT, TileShape, plan_attention, tile_shape

TILES = [
    TileShape(num_rows=16, num_keys=16, split_keys=32, group=1),
    TileShape(num_rows=16, num_keys=16, split_keys=16, group=3),
    TileShape(num_rows=64, num_keys=32, split_keys=64, group=8),
]
LENGTHS = st.lists(st.tuples(st.integers(1, 70), st.integers(0, 200)), min_size=1, max_size=8)  # rows, keys before them


@given(lengths=LENGTHS, tile=st.sampled_from(TILES), is_causal=st.booleans())
def test_each_row_meets_each_of_its_keys_once(lengths: list[tuple[int, int]], tile: TileShape, is_causal: bool) -> None:
    queries, contexts = [rows for rows, _ in lengths], [rows + before for rows, before in lengths]
    plan = plan_attention(queries, contexts, tile, is_causal=is_causal)
    met, written, partial_rows = Counter[tuple[int, int]](), Counter[int](), Counter[int]()
    partials: dict[int, tuple[int, int]] = {}  # partial row -> (row, split)
    starts, visible = np.cumsum(queries) - queries, _visible(queries, contexts, is_causal)
    for request, row, num_rows, position, first_key, stop_key, partial_row in plan.items.tolist():
        assert 0 < num_rows * tile.group <= tile.num_rows
        assert starts[request] <= row
        assert row + num_rows <= starts[request] + queries[request]
        assert position == contexts[request] - queries[request] + row - starts[request]
        assert first_key % tile.split_keys == 0
        for i in range(num_rows):
            met.update((row + i, key) for key in range(first_key, min(stop_key, visible[row + i])))
            if partial_row == WRITES_OUT:
                written[row + i] += 1
            else:
                assert stop_key - first_key <= tile.split_keys
                partials[partial_row + i] = (row + i, first_key // tile.split_keys)
                partial_rows[partial_row + i] += 1
    for row, num_visible, partial_row, stride in plan.merges.tolist():
        written[row] += 1
        assert num_visible == visible[row]
        for split in range(-(-num_visible // tile.split_keys)):
            assert partials[partial_row + split * stride] == (row, split)
    assert met == Counter((row, key) for row, seen in enumerate(visible) for key in range(seen))
    assert written == Counter(range(sum(queries)))
    assert partial_rows == Counter(range(plan.num_partial_rows))


def _visible(queries: list[int], contexts: list[int], is_causal: bool) -> list[int]:
    """Return the number of keys that each row sees."""
    return [
        own + 1 if is_causal else context
        for rows, context in zip(queries, contexts, strict=True)
        for own in range(context - rows, context)
    ]


@given(lengths=LENGTHS, others=LENGTHS)
def test_a_requests_programs_do_not_depend_on_the_others(
    lengths: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    tile = TILES[1]

    def cut(requests: list[tuple[int, int]]) -> list[list[int]]:
        plan = plan_attention([rows for rows, _ in requests], [sum(lengths) for lengths in requests], tile)
        return sorted(plan.items[:, [0, 1, 2, 3, 4, 5]].tolist())

    together = [item for item in cut(lengths + others) if item[0] < len(lengths)]
    assert together == cut(lengths)


def test_long_programs_start_first() -> None:
    plan = plan_attention([1, 5, 1, 90], [9, 5, 200, 90], TILES[0])
    num_keys = plan.items[:, 5] - plan.items[:, 4]
    assert np.all(np.diff(num_keys) <= 0)
    assert plan.items.dtype == plan.merges.dtype == np.int32


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [8, 64, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (32, 32), (64, 8), (71, 1)])
def test_tiles_suit_a_matrix_unit(num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int) -> None:
    tile = tile_shape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, itemsize=itemsize)
    assert tile.num_queries >= 1
    for size in (tile.num_rows, tile.num_keys):
        assert size >= 16
        assert size & (size - 1) == 0
    assert tile.split_keys % tile.num_keys == 0
