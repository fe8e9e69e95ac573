"""GGUF files of Orca: bytes changed anywhere, and whole files whose metadata is of other types, sizes and shapes."""

# ruff: noqa: E501 - lists of words

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from tests.fuzz.target import Case, Input, Target


def write_gguf_seed(folder: Path) -> Path:
    """Write a tiny model, and return its path."""
    from tests.orca.conftest import tiny_metadata, tiny_tensors, write_gguf

    return write_gguf(folder / "tiny.gguf", tiny_metadata(), tiny_tensors())


def gguf_bytes(folder: Path) -> Case:
    """GGUF files whose bytes were changed."""
    from mlsys_orca.loading.load import load_model

    path = folder / "made.gguf"

    def parse(made: Input) -> None:
        assert isinstance(made, bytes)
        path.write_bytes(made)
        load_model(path, dtype="fp32", backend="torch", num_threads=1)

    return Case([write_gguf_seed(folder).read_bytes()], parse, _GGUF_WORDS)


_GGUF_WORDS = ("llama.block_count", "tokenizer.ggml.tokens", "general.alignment", "llama.rope.scaling.type", "GGUF")
_STRING, _ARRAY = 8, 9


def encode_gguf(metadata: dict[str, Any], rest: bytes, num_tensors: int) -> bytes:
    """Return a GGUF file of any metadata at all, nested arrays included, with a table of tensors and their data."""
    pairs = b"".join(_text(key) + _value(value) for key, value in metadata.items())
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors & (2**64 - 1), len(metadata)) + pairs + rest


def _text(text: str) -> bytes:
    content = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(content)) + content


def _value(value: Any) -> bytes:
    kind = _kind(value)
    return struct.pack("<I", kind) + _plain(value, kind)


def _kind(value: Any) -> int:
    if isinstance(value, bool):
        return 7
    if isinstance(value, int):
        return 4 if 0 <= value < 2**32 else 11 if -(2**63) <= value < 2**63 else 10
    return 6 if isinstance(value, float) else _ARRAY if isinstance(value, list) else _STRING


def _plain(value: Any, kind: int) -> bytes:
    if kind == _ARRAY:
        inner = _kind(value[0]) if value else 4
        items = [each for each in value if _kind(each) == inner]
        return struct.pack("<IQ", inner, len(items)) + b"".join(_plain(each, inner) for each in items)
    if kind == _STRING:
        return _text(value if isinstance(value, str) else json.dumps(value))
    if kind == 6:
        return struct.pack("<f", value if abs(value) < 1e38 or value != value else 3e38)
    code = {7: "?", 4: "I", 11: "q", 10: "Q"}[kind]
    return struct.pack(f"<{code}", min(value, 2**64 - 1) if kind == 10 and value > 0 else 0 if kind == 10 else value)


def gguf_metadata(folder: Path) -> Case:
    """GGUF files that are whole and whose metadata is of other types, sizes and shapes."""
    from mlsys_orca.loading.load import load_model
    from mlsys_orca.model.weights.gguf_file import GgufFile

    original = write_gguf_seed(folder)
    opened = GgufFile(original)
    metadata = {key: value for key, value in opened.metadata.items() if key != "general.alignment"}
    entries = sorted(opened.tensors.values(), key=lambda entry: entry.offset)
    start = min(entry.offset for entry in entries)
    data = original.read_bytes()[start:]
    table = [[entry.name, list(entry.shape), int(entry.type), entry.offset - start] for entry in entries]
    seed: Input = {
        "metadata": json.dumps(metadata).encode(),
        "tensors": json.dumps(table).encode(),
    }
    path = folder / "made.gguf"

    def parse(made: Input) -> None:
        assert isinstance(made, dict)
        try:
            pairs, lines = json.loads(made["metadata"]), json.loads(made["tensors"])
            rest = b"".join(_line(*line) for line in lines)
            head = encode_gguf(pairs, rest, len(lines))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error, OverflowError):
            return
        path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
        load_model(path, dtype="fp32", backend="torch", num_threads=1)

    words = ("llama.block_count", "llama.attention.head_count", "llama.rope.scaling.type", "yarn", "linear", "gpt2", "llama",
             "general.architecture", "llama.rope.scaling.original_context_length", "qwen2", "gemma3", "phi3", "t5", "spm",
             "tokenizer.ggml.scores", "tokenizer.ggml.add_bos_token", "llama.expert_count", "bert", "{{ 'a'*10**10 }}")  # fmt: skip
    return Case([seed], parse, words)


def _line(name: str, shape: list[int], kind: int, offset: int) -> bytes:
    mask = 2**64 - 1
    sizes = b"".join(struct.pack("<Q", size & mask) for size in reversed(shape))
    return _text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind & 0xFFFFFFFF, offset & mask)


TARGETS = (
    Target("gguf-bytes", gguf_bytes, share=1),
    Target("gguf-metadata", gguf_metadata, share=2),
)
