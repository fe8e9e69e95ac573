"""ONNX files of strangers: nothing in them runs, and no file that they name outside their folder is read.

WindTunnel hands them to onnxruntime, DVABatch to onnx and onnxruntime. An ONNX file may name other files that hold its
weights, operators that a library of the maker would add, and, in WindTunnel's, classes of the host's part.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlsys_core.errors import MlsysError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

SECRET = np.array([[3.0, 1.0], [4.0, 1.0]])


def _windtunnel(path: Path) -> Any:
    from mlsys_windtunnel.export.onnx import load_onnx

    return load_onnx(path, num_threads=1).predict(np.ones((2, 2)))


def _dvabatch(path: Path) -> Any:
    import torch
    from mlsys_dvabatch.stages.slicing.program import load_program

    return load_program(path, (torch.ones(1, 2, dtype=torch.float64),))


LOADERS: dict[str, Callable[[Path], Any]] = {"windtunnel": _windtunnel, "dvabatch": _dvabatch}


@functools.cache
def _good_bytes() -> bytes:
    from mlsys_windtunnel.convert.translation import translate
    from mlsys_windtunnel.export.onnx import export_onnx
    from sklearn.linear_model import LogisticRegression

    x = np.arange(12.0).reshape(6, 2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "good.onnx"
        export_onnx(translate(LogisticRegression().fit(x, x[:, 0] > 4)), path, methods=["predict"])
        return path.read_bytes()


def _good(folder: Path) -> Any:
    """A model of WindTunnel's own making, also as a file of the folder; without the checksum, which is no secret."""
    (folder / "good.onnx").write_bytes(_good_bytes())
    model = onnx.load(folder / "good.onnx")
    assert "sha256" in model.metadata_props[-1].key
    del model.metadata_props[-1]
    return model


def _refused(load: Callable[[Path], Any], model: Any, path: Path) -> str:
    """Write and load a model; return the reason, which is one line."""
    path.write_bytes(model.SerializeToString())
    with pytest.raises(MlsysError) as error:
        load(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def _with_weights_at(model: Any, location: str) -> Any:
    """The model with its widest weights in another file."""
    weights = max(model.graph.initializer, key=lambda each: int(np.prod(each.dims)))
    for field in ("raw_data", "double_data", "float_data"):
        weights.ClearField(field)
    weights.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", str(8 * int(np.prod(weights.dims))))):
        entry = weights.external_data.add()
        entry.key, entry.value = key, value
    return model


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("where", ["above", "absolute", "link"])
def test_weights_outside_the_folder_are_not_read(loader: str, where: str, tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    secret = tmp_path / "secret.bin"
    secret.write_bytes(SECRET.tobytes())
    (folder / "link.bin").symlink_to(secret)
    location = {"above": "../secret.bin", "absolute": str(secret), "link": "link.bin"}[where]
    said = _refused(LOADERS[loader], _with_weights_at(_good(tmp_path), location), folder / "m.onnx")
    assert "m.onnx" in said


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("loader", LOADERS)
def test_operators_of_a_makers_library_are_refused(loader: str, tmp_path: Path):
    model = _good(tmp_path)
    model.graph.node[0].domain = "maker.example"
    entry = model.opset_import.add()
    entry.domain, entry.version = "maker.example", 1
    assert "m.onnx" in _refused(LOADERS[loader], model, tmp_path / "m.onnx")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "path", ["os:system", "builtins:eval", "subprocess:Popen", "mlsys_windtunnel.parse.load:load_estimator"]
)
def test_the_host_part_names_no_class_of_others(path: str, tmp_path: Path):
    """Each object of the description is exchanged for one of a class that the file's maker chose."""
    model = _good(tmp_path)
    entry = next(each for each in model.metadata_props if each.key == "windtunnel")
    written = json.loads(entry.value)
    assert written["frontend"]["type"] == "frontend"
    written["frontend"] = {"$": "object", "type": path, "state": {"args": ["touch marker"]}}
    entry.value = json.dumps(written)
    assert path in _refused(_windtunnel, model, tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (["Sredict"], "answers that no source gives"),
        (["predict", "__class__"], "answers that no source gives"),
        ([7], "answers/0"),
    ],
)
def test_answers_that_no_source_gives_are_refused(answers: list[Any], words: str, tmp_path: Path):
    model = _good(tmp_path)
    entry = next(each for each in model.metadata_props if each.key == "windtunnel")
    entry.value = json.dumps(json.loads(entry.value) | {"answers": answers})
    assert words in _refused(_windtunnel, model, tmp_path / "m.onnx")


def test_bytes_that_are_no_model_are_refused_in_one_line(tmp_path: Path):
    good = _good(tmp_path).SerializeToString()
    rng = np.random.default_rng(0)
    for length in (0, 1, len(good) // 2, len(good) - 1):
        (tmp_path / "m.onnx").write_bytes(good[:length])
        _assert_told(tmp_path / "m.onnx")
    for _ in range(40):
        changed = bytearray(good)
        for where in rng.integers(0, len(good), 3):
            changed[where] = rng.integers(0, 256)
        (tmp_path / "m.onnx").write_bytes(bytes(changed))
        _assert_told(tmp_path / "m.onnx")


def _assert_told(path: Path) -> None:
    """The file is loaded, or refused in one line."""
    said = ""
    try:
        _windtunnel(path)
    except MlsysError as error:
        said = str(error)
    assert "\n" not in said
