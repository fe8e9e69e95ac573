"""Artifacts of every release are loaded by this version, and answer as they did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.golden.make import HERE, answers_of, hidden_of, pipelines, rows

RELEASES = sorted(path for path in HERE.iterdir() if path.is_dir() and path.name[0].isdigit())
NAMES = ("logistic", "booster", "forest")


def test_every_release_is_here():
    assert RELEASES[0].name == "0.1.0"


def loaded(folder: Path, form: str, name: str) -> Any:
    from mlsys_windtunnel.export.artifact import load
    from mlsys_windtunnel.export.pt2 import load_pt2

    if form == "folder":
        return load(folder / name)
    if form == "pt2":
        return load_pt2(folder / f"{name}.pt2")
    pytest.importorskip("onnxruntime")
    from mlsys_windtunnel.export.onnx import load_onnx

    return load_onnx(folder / f"{name}.onnx")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["folder", "pt2", "onnx"])
@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_pipelines_of_windtunnel(release: Path, form: str, name: str):
    expected = json.loads((release / "windtunnel" / "answers.json").read_text())[name]
    np.testing.assert_allclose(answers_of(loaded(release / "windtunnel", form, name)), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_a_loaded_folder_can_be_trained_further(release: Path):
    import torch
    from mlsys_windtunnel.export.artifact import load

    module = load(release / "windtunnel" / "logistic")
    module(torch.from_numpy(module.encode(rows())))[:, 0].sum().backward()
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    assert any(gradient.abs().sum() > 0 for gradient in gradients)


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_models_of_batchmaker(release: Path):
    from mlsys_batchmaker.models.store import load_model

    expected = json.loads((release / "batchmaker" / "answers.json").read_text())
    np.testing.assert_allclose(hidden_of(load_model(release / "batchmaker")), expected, rtol=1e-6, atol=1e-6)


def test_the_answers_are_those_of_the_sources():
    expected = json.loads((RELEASES[-1] / "windtunnel" / "answers.json").read_text())
    for name, pipeline in pipelines().items():
        np.testing.assert_allclose(answers_of(pipeline), expected[name], rtol=1e-3, atol=1e-3)


def test_files_say_nothing_of_the_machine_that_wrote_them() -> None:
    files = [path for path in HERE.glob("*/**/*") if path.is_file() and path.suffix != ".pyc"]
    assert files
    for path in files:
        assert b'.py", line ' not in path.read_bytes(), path
