"""Kernel selection: measured once on inputs that live so long, kept on disk, never beyond the tile that is allowed."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_nimble import Nimble
from mlsys_nimble.backends.cpu.decisions import Measuring
from mlsys_nimble.backends.cpu.executor import NativeExecutor
from mlsys_nimble.backends.cpu.replay import Slots
from mlsys_nimble.backends.reference.operators import ReferenceExecutor
from mlsys_nimble.ir.operators import Convolution
from mlsys_nimble.ir.program import Operator, Program, ValueType
from torch import nn


def convolution() -> Program:
    generator = torch.Generator().manual_seed(0)
    kind = Convolution((1, 1), ((1, 1), (1, 1)), (1, 1), 1, has_bias=False)
    image, weight = ValueType((1, 32, 14, 14), "float32"), torch.randn(32, 32, 3, 3, generator=generator) / 17
    values = (image, ValueType((32, 32, 3, 3), "float32"), image)
    return Program(values, (Operator("conv", kind, (0, 1), (2,)),), inputs=(0,), outputs=(2,), constants={1: weight})


def names_of(executor: NativeExecutor) -> set[str]:
    return {kernel.name for kernel in executor._kernels.values()} - {"copy"}


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    from mlsys_core.config import settings
    from mlsys_nimble.backends.cpu import library, replay

    library.load(), replay.load_executor()  # from the usual cache, not compiled anew
    monkeypatch.setenv("MLSYS_CACHE_DIR", str(tmp_path))
    settings.cache_clear()
    yield tmp_path
    settings.cache_clear()


@pytest.mark.parametrize("winograd", [0, 2, 4])
def test_every_choice_gives_the_same_answer(cache_dir: Path, winograd: int) -> None:
    executor = NativeExecutor(convolution(), num_threads=1, winograd=winograd)
    x = torch.randn(1, 32, 14, 14)
    torch.testing.assert_close(executor.run([x])[0], ReferenceExecutor(convolution()).run([x])[0], rtol=1e-4, atol=1e-5)
    if winograd == 0:
        assert names_of(executor) == {"convolution"}


def test_a_choice_is_kept_on_disk_and_followed(cache_dir: Path) -> None:
    NativeExecutor(convolution(), num_threads=1)
    [file] = (cache_dir / "nimble").iterdir()
    [signature] = json.loads(file.read_text())
    for choice, kernel in (("winograd 2", "winograd2"), ("usual", "convolution")):
        file.write_text(json.dumps({signature: choice}))
        assert names_of(NativeExecutor(convolution(), num_threads=1)) == {kernel}


def test_a_damaged_file_is_measured_again(cache_dir: Path) -> None:
    NativeExecutor(convolution(), num_threads=1)
    [file] = (cache_dir / "nimble").iterdir()
    file.write_text("{")
    NativeExecutor(convolution(), num_threads=1)
    assert len(json.loads(file.read_text())) == 1


def test_the_facade_hands_its_tile_on(cache_dir: Path) -> None:
    net = torch.nn.Conv2d(32, 32, 3, padding=1)
    for winograd, kept in ((0, 0), (2, 1), (4, 1)):
        Nimble(net).prepare(torch.randn(1, 32, 14, 14), num_threads=1, winograd=winograd)
        found = [text for file in (cache_dir / "nimble").glob("*.json") for text in json.loads(file.read_text())]
        assert sum(f"winograd {winograd}: " in text for text in found) == kept
    with pytest.raises(InvalidInputError, match="winograd is 3"):
        Nimble(net).prepare(torch.randn(1, 32, 14, 14), winograd=3)


def test_sample_inputs_live_while_kernels_are_measured(monkeypatch: pytest.MonkeyPatch):
    bound: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []
    bind, measure = Slots.bind, Measuring._measured

    def watched_bind(self: Slots, inputs: Any) -> list[torch.Tensor]:
        kept = bind(self, inputs)
        bound.extend(weakref.ref(tensor) for tensor in kept)
        return kept

    def watched_measure(self: Measuring, segments: Any) -> dict[int, float]:
        seconds = measure(self, segments)
        alive.extend(each() is not None for each in bound)
        return seconds

    monkeypatch.setattr(Slots, "bind", watched_bind)
    monkeypatch.setattr(Measuring, "_measured", watched_measure)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    Nimble(net).prepare((torch.zeros(2, 8),))
    assert alive
    assert all(alive)
