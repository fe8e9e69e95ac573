"""Packed copies of GGUF files: the same answers to the bit, found by what they were made from, whole or not at all."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from mlsys_core.errors import KernelUnavailableError
from mlsys_orca.backends.native import decoder, kept
from mlsys_orca.backends.native.decoder import NativeDecoder
from mlsys_orca.backends.native.kept import Copies
from mlsys_orca.loading.load import load_model
from torch import Tensor

from tests.orca.forwards import logits_of

Make = Callable[..., Path]
Q = gguf.GGMLQuantizationType


@pytest.fixture(autouse=True)
def small_files_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_LEAST_NBYTES", 0)


@pytest.fixture
def copies(tmp_path: Path) -> Copies:
    return Copies(tmp_path / "packed", 1 << 30)


def logits(model: Any) -> Tensor:
    return logits_of(model, [[5, 9, 200, 31]])[0]


def load(path: Path, copies: Copies | None, **options: Any) -> Any:
    return load_model(path, **{"dtype": "fp32", "copies": copies, **options}).model


def files(copies: Copies) -> list[Path]:
    return sorted(copies.folder.glob("*")) if copies.folder.is_dir() else []


def mixed(weights: dict[str, np.ndarray], kinds: dict[str, Q]) -> dict[str, Any]:
    """Return the weights, quantised: those whose names have one of the words as that word's kind, others as Q8_0."""
    found: dict[str, Any] = {}
    for name, values in weights.items():
        kind = next((kind for word, kind in kinds.items() if word in name), Q.Q8_0)
        found[name] = (gguf.quants.quantize(values, kind), kind) if values.ndim == 2 else values
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1])
def test_a_copy_answers_as_the_file_to_the_bit(make_gguf: Make, copies: Copies, kind: Q, dtype: str) -> None:
    path = make_gguf(kind=kind)
    plain = logits(load(path, None, dtype=dtype))
    first = load(path, copies, dtype=dtype)
    assert first._copy is not None, "what was packed is given back, and the copy mapped"
    assert torch.equal(logits(first), plain)
    (copy,) = files(copies)
    before = copy.read_bytes()
    again = load(path, copies, dtype=dtype)
    assert again._copy is not None
    assert torch.equal(logits(again), plain)
    assert torch.equal(logits(again.with_threads(2)), plain)
    assert copy.read_bytes() == before
    assert again.nbytes == load(path, None, dtype=dtype).nbytes


def test_nothing_is_computed_of_what_has_no_memory(
    make_gguf: Make, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first product of tensors without memory imports torch's compiler: seconds, and a hundred MiB."""
    path, cat = make_gguf(kind=Q.Q4_0), torch.cat
    load(path, copies)

    def with_memory(tensors: Any, *args: Any, **options: Any) -> Tensor:
        assert not any(each.is_meta for each in tensors)
        return cat(tensors, *args, **options)

    monkeypatch.setattr(torch, "cat", with_memory)
    assert load(path, copies)._copy is not None


def test_either_form_of_activations_has_a_copy_of_its_own(make_gguf: Make, copies: Copies) -> None:
    path, forms = make_gguf(kind=Q.Q4_0), ("float", "int8")
    plain = {form: logits(load(path, None, activations=form)) for form in forms}
    assert not torch.equal(plain["float"], plain["int8"])
    for _ in range(2):
        for form in forms:
            again = load(path, copies, activations=form)
            assert torch.equal(logits(again), plain[form])
            assert again.num_integer_products == (len(again.linears) if form == "int8" else 0)
    assert again._copy is not None
    assert len(files(copies)) == 2


def test_kinds_that_differ_within_a_product_are_kept(
    make_gguf: Make, copies: Copies, weights: dict[str, np.ndarray]
) -> None:
    path = make_gguf(tensors=mixed(weights, {"attn_v": Q.Q4_1, "ffn_up": Q.Q4_0, "token_embd": Q.Q4_0}))
    plain = logits(load(path, None))
    load(path, copies)
    again = load(path, copies)
    assert again._copy is not None
    assert torch.equal(logits(again), plain)


@pytest.mark.parametrize("kinds", [{"attn_v": Q.F32}, {"ffn_up": Q.F32}, {"token_embd": Q.F16}, {"ffn_down": Q.BF16}])
def test_floating_matrices_are_read_from_the_file(
    make_gguf: Make, copies: Copies, weights: dict[str, np.ndarray], kinds: dict[str, Q]
) -> None:
    path = make_gguf(tensors=mixed(weights, kinds))
    plain = logits(load(path, None))
    for _ in range(2):  # beside a floating factor gates become floating: no copy is kept of such a file
        assert torch.equal(logits(load(path, copies)), plain)
    assert bool(files(copies)) == ("ffn_up" not in kinds)


def test_another_file_has_another_copy(make_gguf: Make, copies: Copies, weights: dict[str, np.ndarray]) -> None:
    path = make_gguf(kind=Q.Q8_0)
    first = logits(load(path, copies))
    path = make_gguf(kind=Q.Q8_0, tensors={name: values * 1.5 for name, values in weights.items()})
    changed = logits(load(path, copies))
    assert not torch.equal(first, changed)
    assert torch.equal(changed, logits(load(path, None)))
    assert len(files(copies)) == 2


def test_a_change_in_place_is_noticed_though_size_and_time_were_set_back(make_gguf: Make, copies: Copies) -> None:
    path = make_gguf()
    before, status = copies.path_of(path), path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # of content: as an edit that no probe would see
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    assert copies.path_of(path) != before


@pytest.mark.parametrize("damage", ["truncated", "empty", "nonsense", "longer"])
def test_a_copy_that_is_not_whole_is_written_again(make_gguf: Make, copies: Copies, damage: str) -> None:
    path = make_gguf(kind=Q.Q8_0)
    plain = logits(load(path, copies))
    (copy,) = files(copies)
    whole = copy.read_bytes()
    changed = {"truncated": whole[:-4096], "empty": b"", "nonsense": b"x" * 4096, "longer": whole + b"x"}[damage]
    copy.write_bytes(changed)
    assert torch.equal(logits(load(path, copies)), plain)
    assert copy.read_bytes() == whole


def test_the_least_recently_used_copies_go(make_gguf: Make, copies: Copies, weights: dict[str, np.ndarray]) -> None:
    names = []
    for number in range(3):
        path = make_gguf(kind=Q.Q8_0, tensors={name: values * (number + 1) for name, values in weights.items()})
        bounded = copies
        if number == 2:
            os.utime(names[0])
            os.utime(names[1], ns=(0, 0))
            size = sum(file.stat().st_size for file in files(copies))
            bounded = replace(copies, most_nbytes=size + 4096)
        load(path, bounded)
        names.append(next(file for file in files(copies) if file not in names))
    assert files(copies) == sorted([names[0], names[2]])


def test_none_is_kept_where_none_may_be(make_gguf: Make, tmp_path: Path) -> None:
    path = make_gguf(kind=Q.Q8_0)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "file").write_text("")
    for none in (Copies(tmp_path / "none", 0), Copies(tmp_path / "open", 1 << 30), Copies(tmp_path / "file", 1 << 30)):
        assert load(path, none)._copy is None
    assert not (tmp_path / "none").exists()
    assert not list((tmp_path / "open").iterdir())


def test_small_files_have_none(make_gguf: Make, copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_LEAST_NBYTES", 16 << 20)
    load(make_gguf(kind=Q.Q8_0), copies)
    assert files(copies) == []


def test_without_kernels_the_file_itself_is_read(
    make_gguf: Make, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_gguf(kind=Q.Q8_0)
    plain = logits(load(path, copies))

    def refuse(*_: object, **__: object) -> None:
        raise KernelUnavailableError("no C++ compiler was found")

    monkeypatch.setattr(decoder.library, "load", refuse)
    model = load(path, copies)
    assert not isinstance(model, NativeDecoder)
    torch.testing.assert_close(logits(model), plain, atol=1e-4, rtol=1e-4)


def test_floating_files_and_other_forms_have_none(make_gguf: Make, copies: Copies) -> None:
    load(make_gguf(kind=Q.F32), copies)
    load(make_gguf(kind=Q.Q8_0), copies, weights="int8")
    load(make_gguf(kind=Q.Q8_0), copies, backend="torch")
    assert files(copies) == []


@pytest.mark.parametrize("seed", range(8))
def test_writes_are_of_one_size_and_leave_each_part_at_its_place(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_WRITE_NBYTES", 64)
    rng = np.random.default_rng(seed)
    parts, position = [], 0
    for nbytes in rng.integers(0, 200, 12).tolist():
        position += int(rng.integers(0, 80))
        parts.append((position, rng.integers(1, 256, nbytes).astype(np.uint8)))
        position += nbytes
    expected = np.zeros(position + int(rng.integers(0, 150)), np.uint8)
    for offset, part in parts:
        expected[offset : offset + len(part)] = part
    writes: list[bytes] = []

    class File(io.BytesIO):
        def write(self, data: Any) -> int:
            writes.append(bytes(data))
            return len(writes[-1])

    kept._write(File(), parts, len(expected))
    assert b"".join(writes) == expected.tobytes()
    assert {len(each) for each in writes[:-1]} <= {64}
