from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from mlsys_orca.backends.triton.attention import paged_attention
from mlsys_orca.backends.triton.batch import RaggedBatch
from mlsys_orca.backends.triton.plan import TileShape, plan_attention, tile_shape
from mlsys_orca.model.attention import AttentionOptions
from torch import Tensor

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BLOCK = 16  # tokens
# (rows, keys) of each request: prompts, decodes and chunks, of one token, and around a block's and a split's end.
LENGTHS = [(1, 1), (1, BLOCK - 1), (1, BLOCK), (1, BLOCK + 1), (BLOCK - 1, BLOCK - 1), (BLOCK, BLOCK)]
LENGTHS += [(BLOCK + 1, BLOCK + 1), (3, 32), (3, 33), (1, 32), (1, 70), (7, 40), (20, 50)]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCES = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 2e-2}


@dataclass(frozen=True)
class Requests:
    """Some requests' queries, and a cache that has nothing but their keys and values, in blocks all over it."""

    query: Tensor  # [num_tokens, num_heads, head_dim]
    keys: Tensor  # [num_slots, num_kv_heads, head_dim], and as values; not a number where nobody's are
    values: Tensor
    lengths: Sequence[tuple[int, int]]
    block_tables: Tensor

    @classmethod
    def random(
        cls,
        lengths: Sequence[tuple[int, int]],
        heads: tuple[int, int],
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        generator: torch.Generator,
    ) -> Requests:
        num_blocks = [-(-context // BLOCK) for _, context in lengths]
        order = torch.randperm(sum(num_blocks) + 2, generator=generator).int()
        tables = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int32)
        cache = torch.full((2, len(order) * BLOCK, heads[1], head_dim), torch.nan, dtype=dtype)
        for table, ids, (_, context) in zip(tables, order.split([*num_blocks, 2]), lengths, strict=False):
            table[: len(ids)] = ids
            slots = (ids.long()[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:context]
            cache[:, slots] = torch.randn(2, context, heads[1], head_dim, generator=generator).to(dtype)
        query = torch.randn(sum(rows for rows, _ in lengths), heads[0], head_dim, generator=generator).to(dtype)
        return cls(query, *cache, lengths, tables)

    def attend(self, device: torch.device, tile: TileShape, options: AttentionOptions) -> Tensor:
        plan = plan_attention(*zip(*self.lengths, strict=True), tile, is_causal=options.is_causal)
        tables, items, merges = (
            tensor.to(device)
            for tensor in (self.block_tables, torch.from_numpy(plan.items), torch.from_numpy(plan.merges))
        )
        batch = RaggedBatch(tile, BLOCK, tables, items, merges, plan.num_partial_rows)
        query, keys, values = (tensor.to(device) for tensor in (self.query, self.keys, self.values))
        return paged_attention(query, keys, values, batch, options).cpu()

    def expected(self, options: AttentionOptions) -> Tensor:
        """Attention written out, row by row, in fp64."""
        out, row = torch.empty(self.query.shape, dtype=torch.float64), 0
        for table, (rows, context) in zip(self.block_tables, self.lengths, strict=True):
            slots = (table.long()[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:context]
            for position in range(context - rows, context):
                stop = position + 1 if options.is_causal else context
                seen = slots[max(0, stop - (options.window or stop)) : stop]
                out[row] = _attend(self.query[row], self.keys[seen], self.values[seen], options)
                row += 1
        return out.flatten(1)

    def only(self, index: int, rows: slice = slice(None)) -> Requests:
        """One request alone, or some of its rows: those before are in the cache, those after have not come yet."""
        start = sum(rows for rows, _ in self.lengths[:index])
        num_rows, context = self.lengths[index]
        first, last, _ = rows.indices(num_rows)
        query = self.query[start + first : start + last]
        lengths = [(last - first, context - num_rows + last)]
        return Requests(query, self.keys, self.values, lengths, self.block_tables[index : index + 1])


def _attend(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """``query`` [num_heads, head_dim] over ``keys`` and ``values`` [num_seen, num_kv_heads, head_dim]."""
    group = query.shape[0] // keys.shape[1]
    keys, values = (tensor.double().repeat_interleave(group, dim=1) for tensor in (keys, values))
    scores = torch.einsum("hd,nhd->hn", query.double(), keys) * (options.scale or query.shape[1] ** -0.5)
    if options.softcap is not None:
        scores = options.softcap * (scores / options.softcap).tanh()
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), values)


def small_tile(heads: tuple[int, int]) -> TileShape:
    """Few rows and short splits, so that short requests have several of both."""
    return TileShape(num_rows=16, num_keys=16, split_keys=32, group=heads[0] // heads[1])


def assert_close(ours: Tensor, theirs: Tensor, dtype: str = "fp32") -> None:
    """fp64 ``theirs`` within a few roundings."""
    assert torch.allclose(ours.double(), theirs, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.fixture
def no_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    """BLAS, which the interpreter multiplies with, rounds a row by its index among the rows; AMX does not."""
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("mk,kn->mn", a.astype(dtype), b.astype(dtype)))


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(),
        AttentionOptions(window=1),
        AttentionOptions(window=20, scale=0.3),
        AttentionOptions(window=33, softcap=1.5),
    ],
    ids=["plain", "window-1", "window-20-scale", "window-33-softcap"],
)
def test_each_row_sees_its_own_past(
    options: AttentionOptions, device: torch.device, generator: torch.Generator
) -> None:
    requests = Requests.random(LENGTHS, (2, 1), 16, generator=generator)
    assert_close(requests.attend(device, small_tile((2, 1)), options), requests.expected(options))


@pytest.mark.parametrize(
    ("heads", "head_dim"), [((2, 2), 64), ((3, 1), 80), ((8, 1), 128), ((2, 2), 8), ((2, 1), 256)], ids=str
)
def test_heads_of_any_size_and_grouping(
    heads: tuple[int, int], head_dim: int, device: torch.device, generator: torch.Generator
) -> None:
    options = AttentionOptions(window=30)
    requests = Requests.random([(6, 6), (1, 40), (3, BLOCK + 1)], heads, head_dim, generator=generator)
    assert_close(requests.attend(device, small_tile(heads), options), requests.expected(options))


@pytest.mark.parametrize("dtype", ["fp16", *(["bf16"] if not IS_INTERPRETED else [])])  # it cannot multiply bf16
def test_sixteen_bits_differ_by_their_rounding(dtype: str, device: torch.device, generator: torch.Generator) -> None:
    requests = Requests.random(LENGTHS[-4:], (3, 1), 80, dtype=DTYPES[dtype], generator=generator)
    options = AttentionOptions()
    assert_close(requests.attend(device, small_tile((3, 1)), options), requests.expected(options), dtype)


@pytest.mark.parametrize(("heads", "dtype"), [((2, 1), "fp32"), ((3, 1), "fp16")], ids=["fp32", "fp16"])
def test_the_tiles_that_models_get(
    heads: tuple[int, int], dtype: str, device: torch.device, generator: torch.Generator
) -> None:
    tile = tile_shape(num_heads=heads[0], num_kv_heads=heads[1], head_dim=64, itemsize=DTYPES[dtype].itemsize)
    lengths = [(1, tile.split_keys + 1), (30, 70), (1, 1)]
    requests = Requests.random(lengths, heads, 64, dtype=DTYPES[dtype], generator=generator)
    options = AttentionOptions(window=200)
    assert_close(requests.attend(device, tile, options), requests.expected(options), dtype)


@pytest.mark.usefixtures("no_blas")
@pytest.mark.parametrize("window", [None, 25])
def test_a_row_gets_the_same_bits_alone_and_among_others(
    window: int | None, device: torch.device, generator: torch.Generator
) -> None:
    options, tile, lengths = AttentionOptions(window=window), small_tile((2, 1)), LENGTHS[-7:]
    requests = Requests.random(lengths, (2, 1), 16, generator=generator)
    alone = [requests.only(index).attend(device, tile, options) for index in range(len(lengths))]
    assert torch.equal(torch.cat(alone), requests.attend(device, tile, options))


@pytest.mark.usefixtures("no_blas")
@pytest.mark.parametrize("window", [None, 25])
def test_a_row_gets_the_same_bits_however_its_prompt_is_cut(
    window: int | None, device: torch.device, generator: torch.Generator
) -> None:
    """Rows of a long chunk share tiles, which run split after split; a short one's splits run in programs apart."""
    options, tile = AttentionOptions(window=window), small_tile((2, 1))
    prompt = Requests.random([(75, 75)], (2, 1), 16, generator=generator)
    whole = prompt.attend(device, tile, options)
    for start, stop in [(0, 1), (1, 40), (40, 47), (47, 75), (33, 34), (74, 75)]:
        chunk = prompt.only(0, slice(start, stop))
        assert torch.equal(chunk.attend(device, tile, options), whole[start:stop])


def test_encoders_see_both_ways(device: torch.device, generator: torch.Generator) -> None:
    requests = Requests.random([(5, 5), (20, 20), (1, 1), (1, 40)], (2, 1), 16, generator=generator)
    options = AttentionOptions(is_causal=False)
    assert_close(requests.attend(device, small_tile((2, 1)), options), requests.expected(options))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # the interpreter's, which is right to get infinity
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_extreme_scores_stay_finite(softcap: float | None, device: torch.device, generator: torch.Generator) -> None:
    requests, options = (
        Requests.random([(1, 40), (9, 20)], (2, 1), 16, generator=generator),
        AttentionOptions(softcap=softcap),
    )
    requests.query.mul_(3000)
    ours = requests.attend(device, small_tile((2, 1)), options)
    assert torch.allclose(ours.double(), requests.expected(options), atol=2e-3)
