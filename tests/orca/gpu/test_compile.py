"""Every kernel compiles for real GPUs, without one: what the interpreter lets pass, Triton's compiler may refuse."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from mlsys_orca.backends.triton import attention
from mlsys_orca.backends.triton.attention import paged_attention
from mlsys_orca.backends.triton.batch import to_device
from mlsys_orca.backends.triton.plan import TileShape, tile_shape
from mlsys_orca.backends.triton.rowwise import activate, add_norm, gated, prepare_heads
from mlsys_orca.model.attention import AttentionOptions
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.model.layers import ACTIVATIONS
from mlsys_orca.scheduling.batch import BatchBuilder
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}  # bytes a program can have on an A100, and on an H100


class Compiler:
    """Stand-in for the driver: says which GPU there is. Nothing is launched."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.kernels: dict[str, list[Any]] = {}

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target

    def compile(self, run: Any, function: Any, *args: Any, **options: Any) -> None:
        kernel = run(function, *args, **(options | {"warmup": True}))
        known = self.kernels.setdefault(function.__name__, [])
        if kernel not in known:
            known.append(kernel)


@pytest.fixture(params=SHARED_MEMORY, ids=lambda capability: f"sm_{capability}")
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compiler]:
    compiler, run = Compiler(request.param), JITFunction.run
    monkeypatch.setattr(
        JITFunction, "run", lambda self, *args, **options: compiler.compile(run, self, *args, **options)
    )
    monkeypatch.setattr(attention._attend, "configs", attention._attend.configs[1:2])  # nothing to measure
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    before = driver._active
    driver.set_active(compiler)
    yield compiler
    driver._active = before
    assert knobs.runtime.interpret is False
    for kernels in compiler.kernels.values():
        for kernel in kernels:
            assert kernel.asm["cubin"]
            assert kernel.metadata.shared <= SHARED_MEMORY[request.param]


def layer(
    lengths: list[tuple[int, int]],
    tile: TileShape,
    *,
    head_dim: int,
    options: AttentionOptions,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """One layer's kernels for requests of so many rows and keys, with 2 * group query heads and 2 key heads."""
    builder = BatchBuilder()
    for number, (rows, context) in enumerate(lengths):
        table = tuple(range(-(-context // 16)))
        builder.add(str(number), range(rows), num_computed_tokens=context - rows, block_table=table, sampling=None)
    batch = to_device(ForwardInputs(builder.build(), block_size=16, device="cpu"), tile)
    num_tokens, num_heads = len(batch.slots), 2 * tile.group
    keys, values = torch.zeros(2, 64, 2, head_dim, dtype=dtype)
    factors = torch.zeros(2, num_tokens, 1, head_dim)
    qkv = torch.zeros(num_tokens, num_heads + 4, head_dim, dtype=dtype)
    query = prepare_heads(qkv, keys, values, batch.slots, num_heads=num_heads, rotary=(factors[0], factors[1]))
    attended = paged_attention(query, keys, values, batch.ragged, options)
    states = torch.zeros(num_tokens, num_heads * head_dim)
    options_of_norm: dict[str, Any] = {"eps": 1e-5, "is_centred": False, "dtype": dtype}
    normed = add_norm(states, attended, weight=torch.ones(num_heads * head_dim), **options_of_norm)
    activate(gated(normed, activation="silu"), activation="gelu")


def test_kernels_compile_once_for_all_batches(compiler: Compiler) -> None:
    """However many requests, rows and keys: a batch of a new size must not wait for a compiler."""
    tile = tile_shape(num_heads=8, num_kv_heads=2, head_dim=128, itemsize=2)
    assert tile.num_rows == 64
    options = AttentionOptions()
    for lengths in ([(1, 1)], [(1, 600), (17, 17)], [(3, 40), (1, 1), (1, 2), (200, 1000)], [(16, 16)] * 16):
        layer(lengths, tile, head_dim=128, options=options)
    assert {name: len(kernels) for name, kernels in compiler.kernels.items()} == {
        "_prepare": 1,
        "_attend": 1,
        "_merge_splits": 1,
        "_add_norm": 1,
        "_gated": 1,
        "_plain": 1,
    }
    assert ("wgmma" in compiler.kernels["_attend"][0].asm["ptx"]) == (compiler.target.arch == 90)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "options"),
    [
        (64, torch.float32, AttentionOptions()),
        (80, torch.bfloat16, AttentionOptions(window=9)),
        (256, torch.bfloat16, AttentionOptions(window=100, softcap=50.0)),
    ],
    ids=["fp32", "padded", "gemma2"],
)
def test_attention_of_other_models_compiles(
    compiler: Compiler, head_dim: int, dtype: torch.dtype, options: AttentionOptions
) -> None:
    tile = tile_shape(num_heads=6, num_kv_heads=2, head_dim=head_dim, itemsize=dtype.itemsize)
    layer([(1, 600), (2, 20)], tile, head_dim=head_dim, options=options, dtype=dtype)
    assert compiler.kernels.keys() >= {"_prepare", "_attend", "_merge_splits"}


def test_every_branch_of_the_smaller_kernels_compiles(compiler: Compiler) -> None:
    keys, values = torch.zeros(2, 16, 2, 80, dtype=torch.bfloat16)
    qkv, slots, weight = torch.zeros(3, 8, 80, dtype=torch.bfloat16), torch.arange(3), torch.ones(6, 80)
    for rotary in (None, (torch.zeros(3, 1, 20), torch.zeros(3, 1, 20))):
        for norm in (None, weight):
            prepare_heads(qkv, keys, values, slots, num_heads=4, rotary=rotary, norm_weight=norm, eps=1e-5)
    x, row = torch.zeros(3, 100), torch.ones(100)
    for norm, bias in ((None, None), (row, None), (row, row)):
        for branch in (None, x.bfloat16()):
            add_norm(x, branch, weight=norm, bias=bias, eps=1e-5, is_centred=bias is not None, dtype=torch.bfloat16)
    for name in ACTIVATIONS:
        activate(x, activation=name)
        gated(x, activation=name)
    counts = {name: len(kernels) for name, kernels in compiler.kernels.items()}
    assert counts == {"_prepare": 4, "_add_norm": 6, "_plain": 4, "_gated": 4}
