"""GGUF files that lie: one line each, in bounded time and memory."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_orca.api.completions import CompletionRequest, parameters_of
from mlsys_orca.api.server import make_service
from mlsys_orca.engine.engine import EngineConfig
from mlsys_orca.loading.load import load_model
from mlsys_orca.model.weights.gguf_file import GgufFile


def gguf(pairs: bytes, num_pairs: int, tensors: bytes = b"", num_tensors: int = 0, data: bytes = b"") -> bytes:
    whole = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_pairs) + pairs + tensors
    return whole + b"\0" * (-len(whole) % 32) + data


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims) + struct.pack("<IQ", kind, offset)


ARRAY = struct.pack("<I", 9)
HOSTILE_GGUF = {
    "nested arrays": gguf(text("k") + ARRAY + struct.pack("<IQ", 9, 1) * 100_000, 1),
    "arrays of arrays": gguf(text("k") + ARRAY + struct.pack("<IQ", 9, 1 << 60), 1),
    "a list of 2^60 numbers": gguf(text("k") + ARRAY + struct.pack("<IQ", 0, 1 << 60), 1),
    "a list of 2^60 texts": gguf(text("k") + ARRAY + struct.pack("<IQ", 8, 1 << 60) + b"\0" * 4096, 1),
    "a list of no type": gguf(text("k") + ARRAY + struct.pack("<IQ", 77, 4) + b"\0" * 64, 1),
    "2^60 pairs": gguf(b"\0" * 4096, 1 << 60),
    "2^60 tensors": gguf(b"", 0, b"\0" * 4096, 1 << 60),
    "a text of 2^63": gguf(struct.pack("<Q", 1 << 63), 1),
    "a key twice": gguf((text("k") + struct.pack("<IB", 0, 1)) * 2, 2),
    "2^32 dimensions": gguf(b"", 0, text("t") + struct.pack("<I", 0xFFFFFFFF), 1),
    "five dimensions": gguf(b"", 0, entry("t", [1] * 5), 1, b"\0" * 64),
    "no dimensions": gguf(b"", 0, entry("t", []), 1, b"\0" * 64),
    "a dimension of zero": gguf(b"", 0, entry("t", [0]), 1, b"\0" * 64),
    "a negative dimension": gguf(b"", 0, entry("t", [(1 << 64) - 1]), 1, b"\0" * 64),
    "dimensions that overflow": gguf(b"", 0, entry("t", [1 << 32, 1 << 32]), 1, b"\0" * 64),
    "an unknown type": gguf(b"", 0, entry("t", [32], kind=999), 1, b"\0" * 128),
    "an offset past the end": gguf(b"", 0, entry("t", [4], offset=1 << 62), 1, b"\0" * 64),
    "an offset that wraps": gguf(b"", 0, entry("t", [4], offset=(1 << 64) - 16), 1, b"\0" * 64),
    "a tensor twice": gguf(b"", 0, entry("t", [4]) + entry("t", [4], offset=32), 2, b"\0" * 64),
    "tensors that overlap": gguf(b"", 0, entry("a", [8]) + entry("b", [8], offset=16), 2, b"\0" * 64),
    "an alignment of zero": gguf(text("general.alignment") + struct.pack("<II", 4, 0), 1, entry("t", [4]), 1),
    "an alignment of 2^32": gguf(text("general.alignment") + struct.pack("<II", 4, (1 << 32) - 1), 1),
    "blocks cut short": gguf(b"", 0, entry("t", [33], kind=2), 1, b"\0" * 64),
}


@pytest.mark.parametrize("name", HOSTILE_GGUF)
def test_gguf_files_that_lie_are_refused_in_one_line(tmp_path: Path, name: str, refused) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(HOSTILE_GGUF[name])
    assert str(path) in refused(lambda: GgufFile(path))


def test_a_sparse_gguf_of_zeros_takes_neither_time_nor_memory(tmp_path: Path, refused) -> None:
    path = tmp_path / "sparse.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, (1 << 16)))
        file.truncate(2 << 30)
    refused(lambda: GgufFile(path))
    with path.open("r+b") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + ARRAY + struct.pack("<IQ", 8, 1 << 24))
    refused(lambda: GgufFile(path))


@pytest.mark.parametrize(
    "changes",
    [
        {"llama.attention.head_count": 0},
        {"llama.attention.head_count_kv": 0},
        {"llama.block_count": 10_000_000},
        {"llama.block_count": 0},
        {"llama.block_count": 5},
        {"llama.embedding_length": 0},
        {"llama.embedding_length": 1 << 31},
        {"llama.embedding_length": "64"},
        {"llama.feed_forward_length": [96, 96]},
        {"llama.attention.layer_norm_rms_epsilon": -1.0},
        {"llama.attention.layer_norm_rms_epsilon": math.nan},
        {"llama.attention.layer_norm_rms_epsilon": "x"},
        {"llama.rope.freq_base": 0.0},
        {"llama.rope.freq_base": math.inf},
        {"llama.rope.dimension_count": 7},
        {"llama.context_length": 0},
        {"llama.vocab_size": 0},
        {"llama.vocab_size": 1 << 31},
        {"llama.rope.scaling.original_context_length": 0},
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": math.nan},
        {"llama.expert_count": 1 << 31, "llama.expert_used_count": 2},
        {"tokenizer.ggml.tokens": None},
        {"tokenizer.ggml.tokens": 5},
        {"tokenizer.ggml.tokens": ["a" * 100_000, "b"]},
        {"tokenizer.ggml.eos_token_id": 1 << 20},
        {"tokenizer.ggml.bos_token_id": -1.5},
        {"tokenizer.ggml.merges": ["a b", "ab a", "a ab", " ", "x"]},
        {"tokenizer.ggml.token_type": [3]},
        {"tokenizer.ggml.token_type": ["x"] * 260},
        {"tokenizer.ggml.model": ["gpt2"]},
        {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [math.nan] * 260},
        {"tokenizer.ggml.model": "t5", "tokenizer.ggml.scores": [0.0] * 260, "tokenizer.ggml.unknown_token_id": 10_000},
        {"tokenizer.ggml.model": "t5", "tokenizer.ggml.precompiled_charsmap": [255] * 64},
        {"tokenizer.chat_template": 7},
        {"tokenizer.chat_template": "{% if %}"},
        {"general.alignment": "32"},
        {"split.count": "2"},
    ],
    ids=lambda changes: str(changes)[:70],
)  # fmt: skip
def test_gguf_metadata_that_cannot_be_is_refused_in_one_line(
    make_gguf: Callable[..., Path], changes: dict[str, Any], refused
) -> None:
    path = make_gguf(changes)
    refused(lambda: load_model(path, backend="torch"))


def test_they_take_bounded_memory_and_processor_time(tmp_path: Path, cost_of_loading) -> None:
    paths = []
    for name, content in HOSTILE_GGUF.items():
        paths.append(tmp_path / f"{name.replace(' ', '-')}.gguf")
        paths[-1].write_bytes(content)
    seconds, mib = cost_of_loading(paths)
    assert seconds < 1
    assert mib < 100


def test_a_token_that_the_models_table_has_not_is_no_prompt(make_gguf: Callable[..., Path], metadata, weights) -> None:
    more = [*metadata["tokenizer.ggml.tokens"], "<extra>"]
    path = make_gguf(
        {
            "llama.vocab_size": 260,
            "tokenizer.ggml.tokens": more,
            "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], 4],
        },
        tensors=weights,
    )
    service = make_service(load_model(path, dtype="fp32"), "tiny", EngineConfig(max_model_len=64))

    async def ask() -> None:
        with service.engine:
            await service.start(parameters_of(CompletionRequest(model="tiny", prompt="he<extra>he"), service))

    with pytest.raises(InvalidInputError, match="not in the vocabulary"):
        asyncio.run(ask())
