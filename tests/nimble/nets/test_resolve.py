"""Values that a command takes for MODEL."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from mlsys_core.errors import InvalidInputError, MissingDependencyError
from mlsys_nimble.nets import net
from mlsys_nimble.nets.resolve import load_model


def test_a_name():
    module, inputs = load_model("mlp", batch=2)
    assert module(*inputs).shape == (2, 10)


def test_an_exported_program(tmp_path: Path):
    module, inputs = net("six-branch")
    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(module, inputs), path)
    loaded = load_model(str(path))
    torch.testing.assert_close(loaded.module(*inputs), module(*inputs))
    assert [x.shape for x in loaded.inputs] == [x.shape for x in inputs]


def test_a_function_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_nets_of_this_test.py").write_text(
        "import torch\ndef pair(): return torch.nn.Linear(3, 2), torch.ones(1, 3)\ndef one(): return 1\n"
    )
    monkeypatch.chdir(tmp_path)
    module, inputs = load_model("my_nets_of_this_test:pair")
    assert module(*inputs).shape == (1, 2)
    assert not module.training
    with pytest.raises(InvalidInputError, match="gave int; give \\(module, example inputs\\)"):
        load_model("my_nets_of_this_test:one")
    with pytest.raises(InvalidInputError, match="MODEL is a net's name"):
        load_model("my_nets_of_this_test:none")


def test_an_invalid_model_is_refused_with_the_valid_forms(tmp_path: Path):
    with pytest.raises(InvalidInputError, match=r"torch\.export\.save\(program"):
        load_model(str(tmp_path / "none.pt2"))
    (tmp_path / "bad.pt2").write_text("no zip")
    with pytest.raises(InvalidInputError, match=r"is not what torch\.export\.save writes"):
        load_model(str(tmp_path / "bad.pt2"))


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(MissingDependencyError, match=r"timm is not installed: pip install 'mlsys-nimble\[nets\]'"):
        load_model("timm:resnet18")


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            "raise RuntimeError('operator torchvision::nms does not exist\\nmore')",
            "nms does not exist; install the timm",
        ),
        ("import a_module_that_nobody_has", "No module named 'a_module_that_nobody_has'"),
    ],
)
def test_a_library_that_is_broken_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, says: str):
    (tmp_path / "timm.py").write_text(fault)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(MissingDependencyError, match=f"timm is installed and cannot be imported: .*{says}"):
        load_model("timm:resnet18")


@pytest.mark.model
def test_real_weights():
    module, inputs = load_model("transformers:all-minilm-l6-v2")
    with torch.no_grad():
        states = module(*inputs)[0]
    assert states.shape == (1, 128, 384)
