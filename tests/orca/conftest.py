"""Tiny GGUF models with random weights and a byte vocabulary, written on the spot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest

if TYPE_CHECKING:
    from mlsys_orca.loading.loaded import LoadedModel

CHAT_TEMPLATE = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>{% endfor %}"


def byte_alphabet() -> list[str]:
    """The 256 characters that byte-level vocabularies spell bytes with (as published with GPT-2), by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def tiny_metadata() -> dict[str, Any]:
    """Return the contents of the tiny models' files, by key; tests change some of it."""
    tokens = ["<s>", "</s>", *byte_alphabet(), "he", "hel"]
    return {
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": ["h e", "he l"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def tiny_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Weights that fit :func:`tiny_metadata`, tied."""
    generator = np.random.default_rng(seed)
    shapes = {"token_embd.weight": (260, 64)}
    for i in range(2):
        shapes |= {f"blk.{i}.attn_q.weight": (64, 64), f"blk.{i}.attn_output.weight": (64, 64)}
        shapes |= {f"blk.{i}.attn_k.weight": (32, 64), f"blk.{i}.attn_v.weight": (32, 64)}
        shapes |= {f"blk.{i}.ffn_gate.weight": (96, 64), f"blk.{i}.ffn_up.weight": (96, 64)}
        shapes |= {f"blk.{i}.ffn_down.weight": (64, 96)}
    tensors = {name: generator.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    norms = ["output_norm.weight", *(f"blk.{i}.{kind}_norm.weight" for i in range(2) for kind in ("attn", "ffn"))]
    return tensors | {name: generator.normal(1, 0.1, 64).astype(np.float32) for name in norms}


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | tuple[np.ndarray, gguf.GGMLQuantizationType]],
    *,
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """A GGUF file; matrices are stored as ``kind``, vectors as F32, and what has a kind beside it as it is."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
    for name, given in tensors.items():
        if isinstance(given, tuple):
            values, stored = given
        else:
            stored = kind if given.ndim > 1 else gguf.GGMLQuantizationType.F32
            values = gguf.quants.quantize(given, stored)
        writer.add_tensor(name, values, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's file, for servers that many tests share."""
    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", tiny_metadata(), tiny_tensors())


@pytest.fixture
def make_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Write a tiny GGUF: ``make_gguf(changes={key: value or None}, tensors=..., architecture=..., kind=...)``."""

    def make(changes: Mapping[str, Any] | None = None, **options: Any) -> Path:
        metadata = {key: value for key, value in (tiny_metadata() | dict(changes or {})).items() if value is not None}
        return write_gguf(tmp_path / "tiny.gguf", metadata, options.pop("tensors", None) or tiny_tensors(), **options)

    return make


@pytest.fixture
def weights() -> dict[str, np.ndarray]:
    """The tiny model's tensors, to change."""
    return tiny_tensors()


@pytest.fixture
def metadata() -> dict[str, Any]:
    """The tiny model's metadata, to change."""
    return tiny_metadata()


@pytest.fixture
def loaded(make_gguf: Callable[..., Path]) -> LoadedModel:
    """The tiny model in fp32, by torch's operators."""
    from mlsys_orca.loading.load import load_model

    return load_model(make_gguf(), dtype="fp32", backend="torch")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """A team of threads waits for its slowest at each of many small operators: slow on a busy host."""
    from mlsys_orca.backends.runner import intra_op_threads

    with intra_op_threads(1):
        yield
