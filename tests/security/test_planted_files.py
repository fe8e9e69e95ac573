"""Files that run code when they are loaded carelessly, planted in the place of every file that every loader reads.

Each loader gets a good model first, then the same with one file at a time replaced by a pickle, by what ``torch.save``
makes of it, and by numpy's form of it. It must refuse in one line, or not read the file; nothing of it may run.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlsys_core.errors import MlsysError

from tests.fuzz.target import read_folder, write_folder
from tests.fuzz.targets.models import bert_folder, llama_folder


class Payload:
    """An object that writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.write_text, (self.marker, "ran")


def _torch(payload: Payload) -> bytes:
    buffer = io.BytesIO()
    torch.save({"model_state": payload}, buffer)
    return buffer.getvalue()


def _numpy(payload: Payload) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, enc_emb=np.array([payload], dtype=object))
    return buffer.getvalue()


PLANTED: dict[str, Callable[[Payload], bytes]] = {"pickle": pickle.dumps, "torch": _torch, "numpy": _numpy}


@dataclass(frozen=True)
class Loader:
    """A way to load a model or another file; ``files`` are good ones, and ``load`` takes their folder."""

    files: Callable[[Path], dict[str, bytes]]
    load: Callable[[Path], object]
    extra: tuple[str, ...] = ()  # further files that a careless loader would take


def _program(folder: Path) -> dict[str, bytes]:
    exported = torch.export.export(
        torch.nn.Linear(4, 4), (torch.ones(3, 4),), dynamic_shapes=({0: torch.export.Dim.AUTO},)
    )
    torch.export.save(exported, folder / "net.pt2")
    return read_folder(folder)


def _nimble(folder: Path) -> object:
    from mlsys_nimble.nets.resolve import load_model

    net = load_model(str(folder / "net.pt2"))
    return net.module(*net.inputs)


def _nimble_transformers(folder: Path) -> object:
    from mlsys_nimble.nets.resolve import load_model

    return load_model(f"transformers:{folder}")


def _dvabatch(folder: Path) -> object:
    from mlsys_dvabatch.stages.zoo import Loading, load

    return load(str(folder / "net.pt2"), folder, Loading(num_stages=1))


def _dvabatch_folder(folder: Path) -> object:
    from mlsys_dvabatch.stages.zoo import load

    return load(str(folder), folder)


def _batchmaker_files(folder: Path) -> dict[str, bytes]:
    from mlsys_batchmaker.models.sequence import lstm_model
    from mlsys_batchmaker.models.store import save_model

    save_model(lstm_model(num_words=5, hidden_size=4), folder)
    return read_folder(folder)


def _batchmaker(folder: Path) -> object:
    from mlsys_batchmaker.models.store import load_model

    return load_model(folder)


def _g2p(folder: Path) -> object:
    from mlsys_batchmaker.models.g2p import g2p_model

    return g2p_model(folder / "checkpoint20.npz")


def _speaker(folder: Path) -> object:
    from mlsys_batchmaker.models.speaker import speaker_model

    return speaker_model(folder / "pretrained.pt")


def _orca(folder: Path) -> object:
    from mlsys_orca.loading.load import load_model

    return load_model(folder, dtype="fp32", backend="torch")


def _gguf(folder: Path) -> dict[str, bytes]:
    from tests.orca.conftest import tiny_metadata, tiny_tensors, write_gguf

    write_gguf(folder / "tiny.gguf", tiny_metadata(), tiny_tensors())
    return read_folder(folder)


def _orca_gguf(folder: Path) -> object:
    from mlsys_orca.loading.load import load_model

    return load_model(folder / "tiny.gguf", dtype="fp32", backend="torch")


def _adapter_files(folder: Path) -> dict[str, bytes]:
    from tests.orca.test_adapters import write_adapter

    write_adapter(folder / "adapter", 0, ["self_attn.q_proj"])
    return _gguf(folder)


def _adapter(folder: Path) -> object:
    from mlsys_orca.loading.load import load_model
    from mlsys_orca.model.adapters import AdaptedDecoder

    loaded = load_model(folder / "tiny.gguf", dtype="fp32", backend="torch")
    return AdaptedDecoder(loaded.model, {"a": folder / "adapter"})


def _pipeline() -> Any:
    from sklearn.linear_model import LogisticRegression

    x = np.arange(12.0).reshape(6, 2)
    return LogisticRegression().fit(x, x[:, 0] > 4)


def _skops_files(folder: Path) -> dict[str, bytes]:
    import joblib
    import skops.io

    skops.io.dump(_pipeline(), folder / "model.skops")
    joblib.dump(_pipeline(), folder / "model.joblib")
    return read_folder(folder)


def _skops(folder: Path) -> object:
    from mlsys_windtunnel.parse.load import load_estimator

    return load_estimator(folder / "model.skops")


def _joblib(folder: Path) -> object:
    from mlsys_windtunnel.parse.load import load_estimator

    return load_estimator(folder / "model.joblib")


def _artifact_files(folder: Path) -> dict[str, bytes]:
    from mlsys_windtunnel.convert.translation import translate
    from mlsys_windtunnel.export.artifact import save

    save(translate(_pipeline()), folder)
    return read_folder(folder)


def _artifact(folder: Path) -> object:
    from mlsys_windtunnel.export.artifact import load

    return load(folder)


def _windtunnel_pt2_files(folder: Path) -> dict[str, bytes]:
    from mlsys_windtunnel.convert.translation import translate
    from mlsys_windtunnel.export.pt2 import export_pt2

    export_pt2(translate(_pipeline()), folder / "net.pt2", methods=["predict"])
    return read_folder(folder)


def _windtunnel_pt2(folder: Path) -> object:
    from mlsys_windtunnel.export.pt2 import load_pt2

    return load_pt2(folder / "net.pt2").predict(np.ones((2, 2)))


def _windtunnel_onnx_files(folder: Path) -> dict[str, bytes]:
    from mlsys_windtunnel.convert.translation import translate
    from mlsys_windtunnel.export.onnx import export_onnx

    export_onnx(translate(_pipeline()), folder / "net.onnx", methods=["predict"])
    return read_folder(folder)


def _windtunnel_onnx(folder: Path) -> object:
    from mlsys_windtunnel.export.onnx import load_onnx

    return load_onnx(folder / "net.onnx", num_threads=1).predict(np.ones((2, 2)))


def _checkpoint(folder: Path) -> object:
    from mlsys_windtunnel.finetune.checkpoint import FILE, load

    return load((folder / FILE).read_bytes(), folder, "x")


def _core_files(folder: Path) -> dict[str, bytes]:
    from mlsys_core.profiling import ProfileCache, Recorder
    from mlsys_core.profiling.chrome_trace import write_trace

    write_trace(Recorder().recording(), folder / "trace.json")
    (folder / "workload.jsonl").write_bytes(b"")
    (folder / ProfileCache(folder).path(_key()).name).write_bytes(b"{}")
    return read_folder(folder)


def _key() -> Any:
    from mlsys_core.profiling import ProfileKey

    return ProfileKey.of("cpu", {"torch": "2"}, "square")


def _core_trace(folder: Path) -> object:
    from mlsys_core.profiling.chrome_trace import read_trace

    return read_trace(folder / "trace.json")


def _core_workload(folder: Path) -> object:
    from mlsys_bench.workload.trace import read_trace

    return read_trace(folder / "workload.jsonl")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def _core_profile(folder: Path) -> object:
    from mlsys_core.profiling import ProfileCache

    return ProfileCache(folder).get(_key())


def _one(name: str) -> Callable[[Path], dict[str, bytes]]:
    return lambda folder: {name: b""}


_BINS = ("pytorch_model.bin", "training_args.bin", "adapter_model.bin", "model.pkl", "model.pt")
LOADERS = {
    "nimble .pt2": Loader(_program, _nimble),
    "nimble transformers": Loader(lambda folder: bert_folder(), _nimble_transformers, _BINS),
    "dvabatch .pt2": Loader(_program, _dvabatch),
    "dvabatch folder": Loader(lambda folder: bert_folder(), _dvabatch_folder, _BINS),
    "batchmaker": Loader(_batchmaker_files, _batchmaker, ("weights.bin", "weights.pt")),
    "batchmaker g2p": Loader(_one("checkpoint20.npz"), _g2p),
    "batchmaker speaker": Loader(_one("pretrained.pt"), _speaker),
    "orca folder": Loader(lambda folder: llama_folder(), _orca, _BINS),
    "orca gguf": Loader(_gguf, _orca_gguf),
    "orca adapter": Loader(_adapter_files, _adapter, ("adapter/adapter_model.bin",)),
    "windtunnel .skops": Loader(_skops_files, _skops),
    "windtunnel .joblib": Loader(_skops_files, _joblib),
    "windtunnel folder": Loader(_artifact_files, _artifact, ("tensors.pkl", "graph.pkl")),
    "windtunnel .pt2": Loader(_windtunnel_pt2_files, _windtunnel_pt2),
    "windtunnel .onnx": Loader(_windtunnel_onnx_files, _windtunnel_onnx),
    "windtunnel checkpoint": Loader(_one("checkpoint.pt"), _checkpoint),
    "core trace": Loader(_core_files, _core_trace),
    "core workload": Loader(_core_files, _core_workload),
    "core profiles": Loader(_core_files, _core_profile),
}


def _refusal(loader: Loader, folder: Path) -> str:
    """Load what is in ``folder``; return the reason if it is refused."""
    try:
        loader.load(folder)
    except MlsysError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOADERS)
def test_no_loader_runs_what_is_planted(name: str, tmp_path: Path):
    loader = LOADERS[name]
    (tmp_path / "good").mkdir()
    good = loader.files(tmp_path / "good")
    marker = tmp_path / "marker"
    for planted in (*good, *loader.extra):
        for kind, make in PLANTED.items():
            folder = write_folder(good | {planted: make(Payload(marker))}, tmp_path / "planted")
            for stray in set(loader.extra) - {planted}:
                (folder / stray).unlink(missing_ok=True)
            said = _refusal(loader, folder)
            assert "\n" not in said, (planted, kind)
            assert not marker.exists(), f"{name}: {kind} in {planted} ran"
    assert pickle.loads(pickle.dumps(Payload(marker))) == len("ran")  # the payload is a real one
    assert marker.exists()


PT2_LOADERS = [name for name in LOADERS if name in ("nimble .pt2", "dvabatch .pt2", "batchmaker", "windtunnel .pt2")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PT2_LOADERS)
def test_no_member_of_an_archive_runs(name: str, tmp_path: Path):
    """Plant the same in the files within a ``.pt2``: sample inputs, weights, constants and those of older versions."""
    loader = LOADERS[name]
    (tmp_path / "good").mkdir()
    good = loader.files(tmp_path / "good")
    planted = next(file for file in good if file.endswith(".pt2"))
    marker = tmp_path / "marker"
    with zipfile.ZipFile(io.BytesIO(good[planted])) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    root = next(iter(members)).split("/")[0]
    extra = [f"{root}/data/{kind}" for kind in ("weights/model.pt", "constants/model.pt", "constants/custom_obj_0")]
    for member in (*members, *extra):
        for kind in ("pickle", "torch"):
            buffer = io.BytesIO()
            with zipfile.ZipFile(buffer, "w") as archive:
                for each, content in (members | {member: PLANTED[kind](Payload(marker))}).items():
                    archive.writestr(each, content)
            folder = write_folder(good | {planted: buffer.getvalue()}, tmp_path / "planted")
            said = _refusal(loader, folder)
            assert "\n" not in said, (member, kind)
            assert not marker.exists(), f"{name}: {kind} in {member} ran"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["nimble transformers", "dvabatch folder", "orca folder"])
def test_code_in_a_folder_is_never_imported(name: str, tmp_path: Path):
    """``auto_map`` names a Python file of the folder; so do tokenizers and custom modules."""
    import json

    loader, marker = LOADERS[name], tmp_path / "marker"
    code = f"from pathlib import Path\nPath({str(marker)!r}).write_text('ran')\nclass C: pass\n".encode()
    files = loader.files(tmp_path)
    for model_type in (None, "no_such_architecture"):
        raw = json.loads(files["config.json"])
        raw["auto_map"] = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer"), "evil.C")
        raw["model_type"] = model_type or raw["model_type"]
        planted = {
            "config.json": json.dumps(raw).encode(),
            "evil.py": code,
            "__init__.py": code,
            "sitecustomize.py": code,
        }
        modules = json.dumps([{"idx": 0, "name": "0", "path": "", "type": "evil.C"}]).encode()
        folder = write_folder(files | planted | {"modules.json": modules}, tmp_path / "planted")
        _refusal(loader, folder)
        assert not marker.exists()


@pytest.mark.parametrize("template", [
    "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{% for c in [].__class__.__base__.__subclasses__() %}{{ c }}{% endfor %}",
    "{{ raise_exception.__globals__['__builtins__']['open']('MARKER', 'w') }}",
    "{{ strftime_now.__globals__ }}",
])  # fmt: skip
def test_a_chat_template_reaches_no_python(template: str, tmp_path: Path):
    from mlsys_orca.text.chat_template import ChatTemplate

    made = ChatTemplate(template.replace("MARKER", str(tmp_path / "marker")))
    try:
        text = made.render([{"role": "user", "content": "x"}])
    except MlsysError:
        text = ""
    assert "<class" not in text
    assert "builtin" not in text
    assert not (tmp_path / "marker").exists()
