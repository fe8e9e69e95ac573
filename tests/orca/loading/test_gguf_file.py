import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.weights.gguf_file import GgufFile


def test_header_says_what_the_gguf_library_reads(make_gguf: Callable[..., Path]) -> None:
    path = make_gguf(
        {"some.flag": True, "some.list": [1.5, 2.5], "some.text": "né"}, kind=gguf.GGMLQuantizationType.Q8_0
    )
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == expected
    assert ours.names == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        assert ours.shape(tensor.name) == tuple(reversed(tensor.shape.tolist()))
        assert ours.nbytes(tensor.name) == tensor.n_bytes
        out = torch.empty(ours.shape(tensor.name))
        ours.read_into(tensor.name, out)
        assert np.array_equal(out.numpy(), gguf.quants.dequantize(tensor.data, tensor.tensor_type))


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 not a model at all"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(InvalidInputError, match="not a GGUF file"):
        GgufFile(tmp_path / "x.gguf")


def test_a_file_cut_anywhere_is_refused(make_gguf: Callable[..., Path]) -> None:
    whole = make_gguf().read_bytes()
    cut = make_gguf().with_name("cut.gguf")
    tensors_start = len(whole) - sum(GgufFile(make_gguf()).nbytes(name) for name in GgufFile(make_gguf()).names)
    for length in [*range(8, 600, 37), *range(600, tensors_start, 501), tensors_start + 10, len(whole) - 40]:
        cut.write_bytes(whole[:length])
        with pytest.raises(InvalidInputError, match="truncated"):
            GgufFile(cut)


def test_a_length_beyond_the_file_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    for value in (
        struct.pack("<IQ", 8, 1 << 62),
        struct.pack("<IIQ", 9, 8, 1 << 40),
        struct.pack("<IIQ", 9, 4, 1 << 40),
    ):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + value)
        with pytest.raises(InvalidInputError, match=r"truncated|damaged"):
            GgufFile(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (struct.pack(">IQQ", 3, 0, 0), "little-endian"),
        (struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 77), "type 77"),
        (
            struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 4, 999, 0),
            "ggml type 999",
        ),
        (struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 7, 8, 0), "blocks of 32"),
    ],
)
def test_damage_is_named(tmp_path: Path, header: bytes, message: str) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + header)
    with pytest.raises(InvalidInputError, match=message):
        GgufFile(tmp_path / "x.gguf")


def test_a_name_that_is_not_utf8_does_not_stop_the_rest(tmp_path: Path) -> None:
    pair = struct.pack("<Q", 1) + b"k" + struct.pack("<I", 8) + struct.pack("<Q", 2) + b"a\xff"
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair)
    metadata: dict[str, Any] = GgufFile(tmp_path / "x.gguf").metadata
    assert metadata == {"k": "a\ufffd"}
