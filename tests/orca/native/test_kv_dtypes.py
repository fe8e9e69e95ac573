"""Attention over every kind of cache, contexts of several pieces: float64's numbers, the same bits however computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.backends.native import library
from mlsys_orca.backends.native.decoder import new_kv_cache
from mlsys_orca.engine.engine import Engine, EngineConfig
from mlsys_orca.engine.fit import fit_of
from mlsys_orca.loading.load import load_model
from mlsys_orca.model.attention import AttentionOptions, ragged_attention
from mlsys_orca.model.decoder import AttentionSpan
from mlsys_orca.model.kv_cache import kv_nbytes_per_token
from mlsys_orca.scheduling.batch import SamplingParams
from torch import Tensor

from tests.conformance.orca.served import serve
from tests.orca.native.conftest import BUILDS
from tests.orca.native.test_attention import operator_of

BLOCK = library.PANEL
KINDS = {"floats": torch.float32, "halves": torch.bfloat16, "pairs": torch.bfloat16, "fp16": torch.float16}
KINDS |= {"codes": torch.int8}
DTYPES = ("float32", "bfloat16", "float16", "int8")
CASES = [  # query heads, key heads, head_dim; what else
    ((6, 2, 64), AttentionOptions()),
    ((3, 3, 48), AttentionOptions(scale=0.3, softcap=2.0)),
    ((8, 1, 32), AttentionOptions(window=600)),
    ((9, 3, 24), AttentionOptions(window=33)),
]
PIECE = 512
LENGTHS = (1, PIECE, 2 * PIECE + 6)
# Every case where users run, the first on what is slow.
BUILT = [(build, case) for build in BUILDS for case in (CASES if build in ("native", "x86-64-v3") else CASES[:1])]


def empty_cache(kind: str, heads: tuple[int, int, int], num_blocks: int) -> tuple[Tensor, Tensor]:
    """Keys and values in which nothing was written: NaN, in scales too. A begun block of pairs is whole."""
    _, num_kv_heads, dim = heads
    width, scales = -(-dim // 16) * 16, 64 if kind == "codes" else 0
    sizes = ((dim * BLOCK + scales), (width * BLOCK + scales))
    fill = -1 if kind == "codes" else torch.nan
    return tuple(torch.full((num_blocks, num_kv_heads, size), fill, dtype=KINDS[kind]) for size in sizes)  # type: ignore[return-value]


def as_kept(kind: str, x: Tensor) -> Tensor:
    """What a cache of that kind gives back of fp32 ``x`` [.., head_dim], in float64."""
    if kind != "codes":
        return x.to(KINDS[kind]).double()
    top = x.abs().amax(-1, keepdim=True)
    return (x * (torch.tensor(127.0) / top)).round().double() * (top / 127.0).double()


class Text:
    """Requests of random rows, and a cache that one run has filled with all of them."""

    def __init__(self, native: Any, run: Any, ragged: Any, kind: str, case: Any) -> None:
        self.native, self.run, self.ragged, self.kind = native, run, ragged, kind
        self.heads, self.options = case
        torch.manual_seed(self.heads[2])
        blocks = list(range(sum(-(-length // BLOCK) for length in LENGTHS) + 3))
        num_blocks = len(blocks)
        random.Random(3).shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(-(-length // BLOCK))] for length in LENGTHS]
        num_heads, num_kv_heads, dim = self.heads
        self.rows = torch.randn(sum(LENGTHS), num_heads + 2 * num_kv_heads, dim)
        self.starts = [sum(LENGTHS[:index]) for index in range(len(LENGTHS))]
        self.keys, self.values = empty_cache(kind, self.heads, num_blocks)
        self.out = self.attend([(0, length) for length in LENGTHS], range(len(LENGTHS)), threads=2)

    def attend(self, spans: list[tuple[int, int]], which: Any, *, threads: int) -> Tensor:
        """Run ``spans``, (past, new) of the requests ``which``, over the cache."""
        new = [
            self.rows[self.starts[index] + past : self.starts[index] + past + num]
            for index, (past, num) in zip(which, spans, strict=True)
        ]
        states = torch.cat(new).flatten(1).contiguous()
        batch = self.ragged(spans, [self.tables[index] for index in which], self.keys, self.values, cache=self.kind)
        operator = operator_of(self.heads, self.options)
        return self.run(self.native, operator, states, self.heads[0] * self.heads[2], threads=threads, ragged=batch)

    def expected(self) -> Tensor:
        """In float64."""
        num_heads, num_kv_heads, _ = self.heads
        queries = (
            as_kept("pairs", self.rows[:, :num_heads]) if self.kind == "pairs" else self.rows[:, :num_heads].double()
        )
        keys, values = self.rows[:, num_heads:].split(num_kv_heads, dim=1)
        spans = [
            AttentionSpan(start, start + length, length, slice(start, start + length))
            for start, length in zip(self.starts, LENGTHS, strict=True)
        ]
        return ragged_attention(queries, as_kept(self.kind, keys), as_kept(self.kind, values), spans, self.options)


@pytest.mark.parametrize(("build", "case"), BUILT, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_any_threads_and_neighbours_give_the_bits_that_float64_expects(
    build: str, run: Callable[..., Tensor], ragged: Any, kind: str, case: Any
) -> None:
    native = library.load(BUILDS[build])
    if kind == "pairs" and not native.orca_attends_in_pairs(case[0][2]):
        pytest.skip("this build does not keep such heads in pairs")
    text = Text(native, run, ragged, kind, case)
    error = (text.out - text.expected()).abs()
    if kind == "pairs":  # weights are rounded to bf16
        assert error.max() < 0.02
        assert error.square().mean().sqrt() < 0.003
    else:
        assert error.max() < 5e-5
    last = [start + length - 1 for start, length in zip(text.starts, LENGTHS, strict=True)]
    ends = [(length - 1, 1) for length in LENGTHS]
    for threads in (1, 2, 4):  # of a lone request the context is cut in pieces
        for index, end in enumerate(ends):
            alone = text.attend([end], [index], threads=threads)
            assert torch.equal(alone[0], text.out[last[index]]), (threads, index)
        together = text.attend(ends, range(len(ends)), threads=threads)
        assert torch.equal(together, text.out[last]), threads
    chunk = text.attend([(LENGTHS[-1] - 90, 90)], [len(LENGTHS) - 1], threads=3)
    assert torch.equal(chunk, text.out[-90:])


@pytest.mark.parametrize("strange", [-torch.inf, torch.nan])
def test_a_strange_number_in_codes_stays_with_those_who_see_it(
    run: Callable[..., Tensor], ragged: Any, strange: float
) -> None:
    text = Text(library.load(), run, ragged, "codes", CASES[0])
    text.rows[text.starts[1] + 20, -1, 5] = strange  # a value of the last key head
    again = text.attend([(0, length) for length in LENGTHS], range(len(LENGTHS)), threads=2).unflatten(1, (2, -1))
    expected = text.out.unflatten(1, (2, -1))
    assert again[text.starts[1] + 20 : text.starts[2], 1].isnan().all()
    assert torch.equal(again[:, 0], expected[:, 0])
    for others in (slice(0, text.starts[1]), slice(text.starts[2], None)):
        assert torch.equal(again[others], expected[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_dtype", ["fp32", "bf16"])
def test_preempted_and_shared_blocks_change_nothing(make_gguf: Any, dtype: str, model_dtype: Any) -> None:
    rng = random.Random(4)
    shared = [rng.randrange(32) for _ in range(33)]
    prompts = [shared[: rng.randrange(34)] + [rng.randrange(32) for _ in range(rng.randrange(1, 20))] for _ in range(6)]
    model = load_model(make_gguf(), dtype=model_dtype, backend="native").model

    def answers(prompts: list[list[int]], num_blocks: int) -> list[Any]:
        """Tokens and log-probabilities under 'chunked'."""
        sampling = {"sampling": SamplingParams(num_logprobs=1)}
        run = serve(
            model,
            "chunked",
            prompts,
            num_tokens=15,
            num_blocks=num_blocks,
            kv_dtype=dtype,
            max_batch_size=5,
            every_s=0.0,
            request=lambda _: sampling,
            max_batch_tokens=11,
        )
        return [[(token.token_id, token.logprob) for token in answer] for answer in run.answers]

    alone = [answers([prompt], 6)[0] for prompt in prompts]
    assert all(logprob < 0 for answer in alone for _, logprob in answer)
    assert answers(prompts, 9) == alone


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_is_counted_as_it_is_taken(make_gguf: Any, dtype: str) -> None:
    loaded = load_model(make_gguf(), dtype="fp32", backend="native")
    per_token = kv_nbytes_per_token(loaded.config, getattr(torch, dtype))
    cache = new_kv_cache(loaded.model, num_blocks=7, dtype=dtype)
    assert cache.nbytes == 7 * BLOCK * per_token
    with Engine(loaded, EngineConfig(max_model_len=96, kv_dtype=dtype), available_nbytes=400 * 4 * per_token) as engine:
        assert engine.shape.num_kv_tokens == 400, "a quarter of the memory"
        assert engine.shape.kv_nbytes == 400 * per_token
    fit = fit_of(loaded, available_nbytes=2**30, tokens_per_request=64, kv_dtype=dtype)
    assert fit.kv_nbytes_per_token == per_token
    assert ("keys and values", f"{per_token / 1024:.1f} KiB a token, {dtype}") in fit.rows()


def test_what_cannot_be_kept_is_refused_by_name(make_gguf: Any) -> None:
    native, in_torch = (load_model(make_gguf(), dtype="fp32", backend=backend) for backend in ("native", "torch"))
    with pytest.raises(InvalidInputError, match="--kv-dtype is auto, float32, bfloat16, float16 or int8, not 'fp8'"):
        Engine(native, EngineConfig(kv_dtype="fp8"), available_nbytes=2**30)
    with pytest.raises(InvalidInputError, match="--kv-dtype int8 needs a model in native kernels"):
        Engine(in_torch, EngineConfig(kv_dtype="int8"), available_nbytes=2**30)
    for kept in ("auto", "fp32", None):
        shape = Engine(in_torch, EngineConfig(kv_dtype=kept), available_nbytes=2**30).shape
        assert shape.kv_dtype == "float32"
