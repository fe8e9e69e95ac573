"""Exported programs, and what a stranger could change in their files."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Net(nn.Module):
    """A weight, a buffer, a constant, a dynamic size and a dict: something of each that a file can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.arange(4.0))
        self.scale = torch.full((4,), 3.0)

    def forward(self, inputs: dict[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
        x = self.linear(inputs["x"]) * self.scale + self.shift
        rows = inputs["x"].shape[0]
        return {"folded": x.view(rows // 2, 8), "padded": nn.functional.pad(x, (0, 1)), "kept": x[mask > 0].sum()}


@pytest.fixture(scope="session")
def net() -> Net:
    """Return the module that :func:`saved` was exported from."""
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="session")
def inputs() -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs of ``net``."""
    return {"x": torch.randn(6, 4)}, torch.tensor([1, 0, 1, 1, 0, 1])


@pytest.fixture(scope="session")
def original(net: Net, inputs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file that torch wrote of ``net``; not to be changed."""
    rows = torch.export.Dim.AUTO
    exported = torch.export.export(net, inputs, dynamic_shapes={"inputs": {"x": {0: rows}}, "mask": {0: rows}})
    path = tmp_path_factory.mktemp("pt2") / "net.pt2"
    torch.export.save(exported, path, extra_files={"note.json": "{}"})
    return path


Change = Callable[[Any], None]


@pytest.fixture
def forge(original: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes the file again, with members replaced and its JSON changed."""

    def forged(
        *,
        members: dict[str, bytes] | None = None,
        model: Change | None = None,
        weights: Change | None = None,
        constants: Change | None = None,
        compression: int = zipfile.ZIP_STORED,
    ) -> Path:
        changes = {
            "models/model.json": model,
            "data/weights/model_weights_config.json": weights,
            "data/constants/model_constants_config.json": constants,
        }
        replaced = dict(members or {})
        path = tmp_path / "net.pt2"
        with zipfile.ZipFile(original) as source, zipfile.ZipFile(path, "w", compression) as target:
            for info in source.infolist():
                name = info.filename.removeprefix("net/")
                content = replaced.pop(name, source.read(info))
                change = changes.get(name)
                if change is not None:
                    data = json.loads(content)
                    change(data)
                    content = json.dumps(data).encode()
                target.writestr(info.filename, content)
            for name, content in replaced.items():
                target.writestr(f"net/{name}", content)
        return path

    return forged
