from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mlsys_core.native import Struct
from mlsys_core.native import new as new_struct
from mlsys_orca.backends.native import library
from mlsys_orca.model.attention import AttentionOptions, ragged_attention
from mlsys_orca.model.decoder import AttentionSpan
from mlsys_orca.model.layers import RMSNorm, rotate
from torch import Tensor

from tests.orca.native.conftest import BUILDS

Run = Callable[..., Tensor]
BLOCK = library.PANEL
MIXED = [(0, 1), (5, 1), (0, 40), (15, 1), (16, 1), (31, 2), (100, 17), (0, 16), (47, 1)]
DECODES = [(past, 1) for past in (0, 1, 14, 15, 16, 17, 63, 130)]
SHAPES = [(1, 1, 16), (6, 2, 64), (9, 3, 24), (4, 4, 80), (8, 1, 32)]  # query heads, key heads, head_dim


@pytest.fixture(params=["unit", *BUILDS])
def in_pairs(request: pytest.FixtureRequest) -> Any:
    """The library: with AMX, where there is one; without it, in each of its builds."""
    if request.param == "unit":
        native = library.load()
        if not native.orca_has_amx():
            pytest.skip("this processor has no AMX")
        return native
    flags = BUILDS[request.param]  # levels below this machine's have no AMX
    has_amx = request.param == "native" and library.load().orca_has_amx()
    return library.load((*flags, "-mno-amx-bf16") if has_amx else flags)


def operator_of(heads: tuple[int, int, int], options: AttentionOptions, **fields: Any) -> Struct:
    num_heads, num_kv_heads, head_dim = heads
    unused = {"layer": 0, "rotary_dim": 0, "rotary": 0, "norm_eps": 0.0, "head_norm": None, "only_sampled": False}
    unused |= {"head_norm_kind": "rms_norm", "head_shift": None, "sinks": None}
    return new_struct(
        library.load().structs["Attention"],
        source=0,
        target=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        window=options.window or 0,
        scale=options.scale or head_dim**-0.5,
        softcap=options.softcap or 0.0,
        value_column=(num_heads + num_kv_heads) * head_dim,
        **{**unused, **fields},
    )


class Case:
    """A ragged batch whose past is known, and what torch's attention makes of it."""

    def __init__(self, heads: tuple[int, int, int], spans: list[tuple[int, int]], dtype: torch.dtype) -> None:
        num_heads, num_kv_heads, dim = heads
        torch.manual_seed(len(spans) + dim)
        self.heads, self.spans = heads, spans
        blocks = list(range(sum(-(-(past + new) // BLOCK) for past, new in spans) + 3))
        random.Random(dim).shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(-(-(past + new) // BLOCK))] for past, new in spans]
        self.contexts = [torch.randn(past + new, 2, num_kv_heads, dim).to(dtype) for past, new in spans]
        num_blocks = len(blocks) + sum(map(len, self.tables))
        # What was never written may be anything.
        self.keys = torch.full((num_blocks, num_kv_heads, dim, BLOCK), torch.nan, dtype=dtype)
        self.values = torch.full((num_blocks, num_kv_heads, BLOCK, -(-dim // 16) * 16), torch.nan, dtype=dtype)
        for (past, _), table, context in zip(spans, self.tables, self.contexts, strict=True):
            for position in range(past):
                block, at = table[position // BLOCK], position % BLOCK
                self.keys[block, :, :, at] = context[position, 0]
                self.values[block, :, at, :dim] = context[position, 1]
        new_rows = [context[past:] for (past, _), context in zip(spans, self.contexts, strict=True)]
        rows = torch.cat(new_rows).float()
        self.queries = torch.randn(len(rows), num_heads, dim)
        self.states = torch.cat((self.queries, rows[:, 0], rows[:, 1]), dim=1).flatten(1).contiguous()

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Keys and values with two features, and two tokens, side by side; a begun block of values is whole."""
        values = self.values.clone()
        for (past, _), table in zip(self.spans, self.tables, strict=True):
            if past % BLOCK:
                values[table[past // BLOCK], :, past % BLOCK :] = 0
        return self.keys.unflatten(2, (-1, 2)).movedim(3, 4).contiguous(), (
            values.unflatten(2, (-1, 2)).movedim(3, 4).contiguous()
        )

    def expected(self, options: AttentionOptions) -> Tensor:
        slots = torch.cat([context.float() for context in self.contexts])
        spans, row, slot = [], 0, 0
        for past, new in self.spans:
            spans.append(AttentionSpan(row, row + new, past + new, slice(slot, slot + past + new)))
            row, slot = row + new, slot + past + new
        return ragged_attention(self.queries, slots[:, 0], slots[:, 1], spans, options)


@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("spans", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_is_torchs(native: Any, run: Run, ragged: Any, heads: Any, spans: Any, dtype: torch.dtype) -> None:
    for options in (
        AttentionOptions(),
        AttentionOptions(scale=0.3, softcap=2.0),
        AttentionOptions(window=9),
        AttentionOptions(window=33, softcap=5.0),
    ):
        case = Case(heads, spans, dtype)
        cache = "floats" if dtype == torch.float32 else "halves"
        batch = ragged(spans, case.tables, case.keys, case.values, cache=cache)
        width = heads[0] * heads[2]
        out = run(native, operator_of(heads, options), case.states, width, threads=2, ragged=batch)
        assert torch.allclose(out, case.expected(options), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("heads", [(6, 2, 64), (2, 2, 32), (40, 1, 96), (4, 4, 80), (13, 1, 16)], ids=str)
def test_a_cache_of_pairs_is_attended_in_pairs(in_pairs: Any, run: Run, ragged: Any, heads: Any) -> None:
    for options in (
        AttentionOptions(),
        AttentionOptions(scale=0.3, softcap=2.0),
        AttentionOptions(window=33),
    ):
        for spans in (MIXED, DECODES, [(0, 150)]):
            case = Case(heads, spans, torch.bfloat16)
            case.queries = case.queries.bfloat16().float()  # it rounds them itself
            case.states[:, : heads[0] * heads[2]] = case.queries.flatten(1)
            batch = ragged(spans, case.tables, *case.pairs(), cache="pairs")
            operator = operator_of(heads, options)
            out = run(in_pairs, operator, case.states, heads[0] * heads[2], threads=2, ragged=batch)
            assert torch.allclose(out, case.expected(options), rtol=0, atol=0.02)
            assert (out - case.expected(options)).square().mean().sqrt() < 0.003  # weights rounded to bf16


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_a_request_gets_the_same_bits_alone_in_any_batch_and_in_any_chunks(
    native: Any, run: Run, ragged: Any, heads: Any
) -> None:
    case = Case(heads, [(0, 90), *MIXED], torch.float32)
    same_bits_in_any_batch_and_chunks(native, run, ragged, case, case.keys, case.values, "floats")


@pytest.mark.parametrize("heads", [(6, 2, 64), (40, 1, 96), (4, 4, 80)], ids=str)
def test_pairs_give_the_same_bits_in_any_batch(in_pairs: Any, run: Run, ragged: Any, heads: Any) -> None:
    case = Case(heads, [(0, 90), *MIXED], torch.bfloat16)
    same_bits_in_any_batch_and_chunks(in_pairs, run, ragged, case, *case.pairs(), "pairs")


def same_bits_in_any_batch_and_chunks(
    native: Any, run: Run, ragged: Any, case: Case, all_keys: Tensor, all_values: Tensor, cache: str
) -> None:
    options, width = AttentionOptions(window=50), case.heads[0] * case.heads[2]
    batch = ragged(case.spans, case.tables, all_keys.clone(), all_values.clone(), cache=cache)
    together = run(native, operator_of(case.heads, options), case.states, width, threads=2, ragged=batch)
    assert together.isfinite().all()
    for chunk in (1, 7, 16, 90):
        keys, values = all_keys.clone(), all_values.clone()
        for first in range(0, 90, chunk):
            new = min(chunk, 90 - first)
            alone = ragged([(first, new)], case.tables[:1], keys, values, cache=cache)
            states = case.states[first : first + new].clone()
            out = run(native, operator_of(case.heads, options), states, width, threads=1, ragged=alone)
            assert torch.equal(out, together[first : first + new]), (chunk, first)


def test_heads_are_normalised_and_rotated(native: Any, run: Run, ragged: Any) -> None:
    heads, rotary_dim = (4, 2, 32), 20
    case = Case(heads, [(0, 5), (0, 1), (0, 40)], torch.float32)
    rows = len(case.states)
    norm = RMSNorm(torch.rand(6, 32) + 0.5, eps=1e-5, dtype=torch.float32)
    angles = torch.rand(rows, rotary_dim // 2) * 6
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    operator = operator_of(
        heads, AttentionOptions(), rotary_dim=rotary_dim, norm_eps=1e-5, head_norm=norm.weight.data_ptr()
    )
    batch = ragged(case.spans, case.tables, case.keys, case.values, cos, sin)
    out = run(native, operator, case.states, 4 * 32, threads=2, ragged=batch)

    qkv = case.states.view(rows, 8, 32)
    qk = rotate(norm(qkv[:, :6]), cos[:, None], sin[:, None])
    spans = [
        AttentionSpan(0, 5, 5, slice(0, 5)),
        AttentionSpan(5, 6, 1, slice(5, 6)),
        AttentionSpan(6, 46, 40, slice(6, 46)),
    ]
    expected = ragged_attention(qk[:, :4], qk[:, 4:], qkv[:, 6:], spans)
    assert torch.allclose(out, expected, rtol=1e-4, atol=2e-5)
