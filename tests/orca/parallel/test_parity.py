"""Parts of a model give the bits of the whole, whatever the degrees, the family and the form of weights."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_orca.backends.native import lowering
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.model.slices import num_slices
from mlsys_orca.parallel.loading import load_head_only, load_shard
from mlsys_orca.parallel.placement import Placement
from mlsys_orca.parallel.shard import GroupBrokenError
from mlsys_orca.parallel.tensors.shared_memory import SharedReducer

from tests.orca.parallel.places import BLOCK, CASES, EIGHT, MORE, assert_equal, run_places, run_whole, some_batches

NATIVE = list(CASES)
WHOLE = {  # what ranks cannot share, and why
    "olmo2": "norms over all heads",
    "gpt_oss": "a shared expert or biases of experts",
    "deepseek_v3": "one latent of all heads",
}
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "fp32", "weights": "float"},
    "bf16": {"dtype": "bf16", "weights": "float"},
    "int8": {"dtype": "bf16", "weights": "int8", "activations": "float"},
    "int4": {"dtype": "fp32", "weights": "int4", "activations": "float"},
    "int4-products": {"dtype": "fp32", "weights": "int4", "activations": "int8"},
}
BLOCKS = {  # a GGUF of llama's shape
    "llama.embedding_length": 256,
    "llama.block_count": 2,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 4,
    "llama.rope.dimension_count": 32,
    "llama.feed_forward_length": 512,
}


def tensors_of(heads: int, kv_heads: int, dim: int, inner: int, *, hidden: int, seed: int) -> dict[str, Any]:
    """Weights of two layers."""
    generator = np.random.default_rng(seed)
    shapes = {"token_embd.weight": (260, hidden)}
    for i in range(2):
        shapes |= {
            f"blk.{i}.attn_q.weight": (heads * dim, hidden),
            f"blk.{i}.attn_output.weight": (hidden, heads * dim),
        }
        shapes |= {f"blk.{i}.attn_{each}.weight": (kv_heads * dim, hidden) for each in "kv"}
        shapes |= {f"blk.{i}.ffn_{each}.weight": (inner, hidden) for each in ("gate", "up")}
        shapes |= {f"blk.{i}.ffn_down.weight": (hidden, inner)}
    tensors = {name: generator.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    norms = ["output_norm.weight", *(f"blk.{i}.{kind}_norm.weight" for i in range(2) for kind in ("attn", "ffn"))]
    return tensors | {name: generator.normal(1, 0.1, hidden).astype(np.float32) for name in norms}


def stored_as(tensors: dict[str, Any], kind: str) -> dict[str, Any]:
    """The tensors, matrices as blocks of that kind; those that the library cannot write have random codes.

    ``Q4_K_M``: values as Q6_K, the rest as Q4_K.
    """
    if kind == "Q4_K_M":
        values = {name: each for name, each in tensors.items() if "attn_v" in name}
        return stored_as(tensors, "Q4_K") | stored_as(values, "Q6_K")
    quantization = gguf.GGMLQuantizationType[kind]
    block_len, block_nbytes = gguf.GGML_QUANT_SIZES[quantization]
    # Bytes of a block where an fp16 factor is.
    scales = {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
    generator = np.random.default_rng(9)

    def blocks_of(shape: tuple[int, int]) -> Any:
        blocks = generator.integers(0, 256, (shape[0], shape[1] // block_len, block_nbytes), dtype=np.uint8)
        for at in scales[kind]:
            factors = generator.uniform(1e-4, 3e-4, blocks.shape[:2]).astype(np.float16)
            blocks[..., at : at + 2] = factors[..., None].view(np.uint8)
        return blocks.reshape(shape[0], -1)

    return {
        name: values
        if values.ndim == 1
        else (blocks_of(values.shape) if kind in scales else gguf.quants.quantize(values, quantization), quantization)
        for name, values in tensors.items()
    }


@pytest.mark.some_cases(26)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NATIVE)
def test_parts_give_the_bits_of_the_whole(checkpoints: Any, name: str, form: str) -> None:
    path, batches = checkpoints(name), some_batches()
    expected = run_whole(path, batches, backend="native", **FORMS[form])
    degrees = [(3, 1), (3, 2)] if name == "llama-of-3" else [(2, 1), (4, 1), (1, 2), (1, 3), (2, 2)]
    for ranks, stages in degrees:
        found = run_places(path, batches, ranks=ranks, stages=stages, **FORMS[form])
        assert_equal(found, expected)


@pytest.mark.parametrize("name", MORE)
def test_parts_of_further_families_give_the_bits_of_the_whole(checkpoints: Any, name: str) -> None:
    path, batches, ranks = checkpoints(name), some_batches(), 1 if name in WHOLE else 2
    expected = run_whole(path, batches, backend="native", dtype="fp32")
    assert_equal(run_places(path, batches, ranks=ranks, stages=2, dtype="fp32"), expected)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("name", "form"), list(zip(EIGHT, FORMS, strict=True)))
def test_eight_ranks_give_the_bits_of_one_process_that_sums_in_eight_slices(
    checkpoints: Any, name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, batches = checkpoints(name), some_batches()
    of_four = run_whole(path, batches, backend="native", **FORMS[form])
    monkeypatch.setattr(lowering, "num_slices", lambda config: num_slices(config, 8))
    of_eight = run_whole(path, batches, backend="native", **FORMS[form])
    for stages in (1, 2):
        assert_equal(run_places(path, batches, ranks=8, stages=stages, **FORMS[form]), of_eight)
    if form == "fp32":
        assert all(torch.allclose(*pair, atol=1e-3) for pair in zip(logits(of_eight), logits(of_four), strict=True))


@pytest.mark.parametrize("name", WHOLE)
def test_what_all_heads_share_is_not_divided(checkpoints: Any, name: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"tensor-parallel 2 .*, {WHOLE[name]}\); 1 does"):
        run_places(checkpoints(name), some_batches(), ranks=2, stages=1, dtype="fp32")


def logits(answers: list[Any]) -> list[torch.Tensor]:
    return [answer.logits for answer in answers]


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(checkpoints: Any, threads: int) -> None:
    path, batches = checkpoints("llama"), some_batches()
    expected = run_whole(path, batches, dtype="bf16", backend="native")
    assert_equal(run_places(path, batches, ranks=2, stages=1, num_threads=threads, dtype="bf16"), expected)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "Q4_K_M", "F16"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_ggufs_blocks_are_cut_between_groups(make_gguf: Any, kind: str, dtype: str) -> None:
    path = make_gguf(BLOCKS, tensors=stored_as(tensors_of(8, 4, 32, 2 * 256, hidden=256, seed=3), kind))
    batches = some_batches(260)
    options: dict[str, Any] = {"dtype": dtype, "activations": "int8" if dtype == "bf16" else "float"}
    expected = run_whole(path, batches, backend="native", **options)
    for ranks, stages in ((2, 1), (4, 1), (2, 2)):
        assert_equal(run_places(path, batches, ranks=ranks, stages=stages, **options), expected)


def test_a_rank_reads_and_holds_its_part(make_gguf: Any) -> None:
    path = make_gguf(BLOCKS, tensors=tensors_of(8, 4, 32, 2 * 256, hidden=256, seed=3))
    read: list[int] = []

    def shard_of(**place: int) -> Any:
        return load_shard(path, Placement(**place), dtype="fp32", progress=lambda done, of: read.append(of))

    whole = shard_of()
    of_all = read[-1]
    for ranks, stages in ((2, 1), (4, 1), (1, 2), (4, 2)):
        shards = [
            shard_of(stage=stage, num_stages=stages, rank=rank, num_ranks=ranks)
            for stage in range(stages)
            for rank in range(ranks)
        ]
        table = 260 * 256 * 4  # embedded by the first stage; multiplied with by the last, which packs it
        norms = 5 * 256 * 4
        share = (of_all - table) / (ranks * stages) + table / ranks
        assert max(read[-ranks * stages :]) <= share + norms + 4096
        most = (whole.nbytes - 2 * table) / (ranks * stages) + 2 * table / ranks
        assert max(shard.nbytes for shard in shards) <= most + 2 * norms + 40_000  # panels are filled up
    with pytest.raises(InvalidInputError, match="tensor-parallel 3 does not divide"):
        shard_of(num_ranks=3)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_smollm2_in_parts(smollm2_path: Path, dtype: str) -> None:
    batches = some_batches(49152)
    expected = run_whole(smollm2_path, batches, dtype=dtype)
    for ranks, stages in ((3, 1), (1, 2), (3, 2)):
        assert_equal(run_places(smollm2_path, batches, ranks=ranks, stages=stages, dtype=dtype), expected)


def test_a_rank_whose_peer_is_gone_ends_with_an_error(checkpoints: Any) -> None:
    path, batch = checkpoints("llama"), some_batches()[0]
    shard = load_shard(path, Placement(rank=0, num_ranks=2), dtype="fp32")
    memory = SharedReducer.create(shard.whole, num_ranks=2)
    mine, theirs = (SharedReducer(memory, shard.whole, rank=rank, num_ranks=2) for rank in range(2))
    joined = shard.join(mine, num_threads=2)
    threading.Timer(0.2, theirs.abort).start()
    with pytest.raises(GroupBrokenError):
        joined.run(ForwardInputs(batch, block_size=BLOCK, device="cpu"), None, None, joined.new_kv_cache(num_blocks=24))
    with pytest.raises(GroupBrokenError):  # and from then on
        joined.run(ForwardInputs(batch, block_size=BLOCK, device="cpu"), None, None, joined.new_kv_cache(num_blocks=24))


def test_a_peer_that_leaves_amid_the_layers_is_noticed(checkpoints: Any) -> None:
    path, batch = checkpoints("llama"), some_batches()[0]
    shard = load_shard(path, Placement(rank=0, num_ranks=2), dtype="fp32")
    memory = SharedReducer.create(shard.whole, num_ranks=2)
    mine, theirs = (SharedReducer(memory, shard.whole, rank=rank, num_ranks=2) for rank in range(2))

    def peer() -> None:
        theirs.exchange(torch.zeros(batch.num_tokens, shard.whole.hidden_size))  # embeds, then is gone
        theirs.abort()

    thread = threading.Thread(target=peer)
    thread.start()
    joined = shard.join(mine, num_threads=1)
    with pytest.raises(GroupBrokenError):
        joined.run(ForwardInputs(batch, block_size=BLOCK, device="cpu"), None, None, joined.new_kv_cache(num_blocks=24))
    thread.join()


def test_a_part_without_its_reducer_is_refused(checkpoints: Any) -> None:
    shard = load_shard(checkpoints("llama"), Placement(rank=1, num_ranks=2), dtype="fp32")
    memory = SharedReducer.create(shard.whole, num_ranks=2)
    with pytest.raises(InvalidInputError, match="rank 1 of 2 cannot run alone"):
        shard.join(None, num_threads=1)
    with pytest.raises(InvalidInputError, match="the reducer is of rank 0 of 2, the part of rank 1 of 2"):
        shard.join(SharedReducer(memory, shard.whole, rank=0, num_ranks=2), num_threads=1)


def test_the_master_loads_all_but_the_weights(checkpoints: Any) -> None:
    loaded = load_head_only(checkpoints("llama"), dtype="bf16", placement=Placement(num_ranks=4, num_stages=3))
    assert loaded.config.num_heads == 8
    assert loaded.model.dtype == torch.bfloat16
    with pytest.raises(InvalidInputError, match="tensor-parallel 3 does not divide"):
        load_head_only(checkpoints("llama"), placement=Placement(num_ranks=3))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[dict[str, int], int, int]:
    """A Llama's shape, and degrees that divide it."""
    ranks, stages = draw(st.sampled_from([2, 3, 4])), draw(st.sampled_from([1, 2]))
    kv_heads = ranks * draw(st.integers(1, 2))
    shape = {
        "heads": kv_heads * draw(st.integers(1, 3)),
        "kv_heads": kv_heads,
        "dim": draw(st.sampled_from([32, 64])),
        "inner": 12 * 32 * draw(st.integers(1, 2)),
        "hidden": 32 * draw(st.integers(1, 5)),
    }
    return shape, ranks, stages


@given(shapes(), st.sampled_from(sorted(FORMS)))
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_shape_in_parts_gives_the_bits_of_the_whole(
    make_gguf: Any, case: tuple[dict[str, int], int, int], form: str
) -> None:
    shape, ranks, stages = case
    heads, kv_heads, dim, inner, hidden = (shape[key] for key in ("heads", "kv_heads", "dim", "inner", "hidden"))
    metadata = {
        "llama.embedding_length": hidden,
        "llama.block_count": 2,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.key_length": dim,
        "llama.attention.value_length": dim,
        "llama.rope.dimension_count": dim,
        "llama.feed_forward_length": inner,
    }
    path = make_gguf(metadata, tensors=tensors_of(heads, kv_heads, dim, inner, hidden=hidden, seed=1))
    loaded = load_head_only(path, dtype="fp32")
    assume(num_slices(loaded.config) % ranks == 0)
    batches = some_batches(260)
    expected = run_whole(path, batches, backend="native", **FORMS[form])
    assert_equal(run_places(path, batches, ranks=ranks, stages=stages, **FORMS[form]), expected)
