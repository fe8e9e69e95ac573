"""Models as directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mlsys_batchmaker.cells.cell import cell, make_cell
from mlsys_batchmaker.models.model import Model
from mlsys_batchmaker.models.sequence import SequenceEncoder, lstm_model, seq2seq_model
from mlsys_batchmaker.models.store import ExportedCell, load_model, save_model
from mlsys_batchmaker.plan import Port
from mlsys_core.errors import InvalidInputError
from torch import nn


@cell
class OwnCell(nn.Module):
    """A cell no table knows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 4))

    def ports(self):
        states = [Port("h", "float32", (4,)), Port("c", "float32", (4,))]
        return [Port("word", "int64", high=7), *states], states

    def forward(self, word, h, c):
        return torch.tanh(self.table[word] + h), c + h


def test_a_cell_of_a_known_class_comes_back(tmp_path: Path):
    model = seq2seq_model(num_words=9, hidden_size=8)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.name == "seq2seq"
    for ours, theirs in zip(loaded.cells, model.cells, strict=True):
        assert type(ours.module) is type(theirs.module)
        assert ours.spec == theirs.spec
        assert ours.identity == theirs.identity


def test_every_file_can_be_read_by_whom_the_umask_lets(tmp_path: Path):
    save_model(lstm_model(num_words=9, hidden_size=8, batch_sizes=(1,)), tmp_path)
    (tmp_path / "plain").touch()
    mode = (tmp_path / "plain").stat().st_mode
    assert {path.stat().st_mode for path in tmp_path.rglob("*") if path.is_file()} == {mode}


def test_any_cell_runs_as_its_exported_graph(tmp_path: Path):
    torch.manual_seed(0)
    model = Model("own", [make_cell("lstm", OwnCell())], SequenceEncoder(4))
    save_model(model, tmp_path)
    (loaded,) = load_model(tmp_path, name="other").cells
    assert isinstance(loaded.module, ExportedCell)
    for size in (1, 5):
        inputs = loaded.example(size)
        with torch.inference_mode():
            for ours, theirs in zip(loaded.run(*inputs), model.cells[0].run(*inputs), strict=True):
                torch.testing.assert_close(ours, theirs)


def test_damaged_directories(tmp_path: Path):
    with pytest.raises(InvalidInputError, match="holds no model"):
        load_model(tmp_path)
    manifest = save_model(lstm_model(num_words=5, hidden_size=4), tmp_path)
    whole = json.loads(manifest.read_text())
    huge = {"class": "WordLSTMCell", "sizes": {"num_words": 1 << 50, "hidden_size": 4}}
    for change, says in [
        ({"format": "x"}, "another format"),
        ({"architecture": {"name": "os:system", "config": {}}}, "--trust-code"),
        ({"cells": [{**whole["cells"][0], "name": "../../x"}]}, "cell name"),
        ({"cells": []}, "at least one cell"),
        ({"cells": [{**whole["cells"][0], "module": huge}]}, "not those of its weights"),
    ]:
        manifest.write_text(json.dumps({**whole, **change}))
        with pytest.raises(InvalidInputError, match=says):
            load_model(tmp_path)
    manifest.write_text(json.dumps(whole))
    manifest.write_bytes(b"\xff{}")
    with pytest.raises(InvalidInputError, match=r"holds no model .*UnicodeDecodeError"):
        load_model(tmp_path)
    manifest.write_text(json.dumps(whole))
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:40])
    with pytest.raises(InvalidInputError, match="holds no model"):
        load_model(tmp_path)


def test_identity_is_of_graph_weights_and_shapes():
    torch.manual_seed(0)
    first = make_cell("a", OwnCell())
    same = make_cell("b", OwnCell())
    same.module.load_state_dict(first.module.state_dict())
    other = make_cell("c", OwnCell())
    assert first.identity == same.identity != other.identity


def test_equal_types_are_one():
    torch.manual_seed(0)
    first, same, other = (make_cell(name, OwnCell()) for name in ("lstm", "same", "other"))
    same.module.load_state_dict(first.module.state_dict())
    model = Model("m", [first, same, other], SequenceEncoder(4))
    assert model.layout.cell_number("same") == model.layout.cell_number("lstm") == 0
    assert model.layout.cell_number("other") == 2


class Mixing(OwnCell):
    def forward(self, word, h, c):
        return h - h.mean(dim=0), c


class Transposed(OwnCell):
    def forward(self, word, h, c):
        return h.t(), c


class Failing(OwnCell):
    def forward(self, word, h, c):
        raise ValueError("no")


@pytest.mark.parametrize(
    ("module", "says"),
    [(Mixing, "mixes requests"), (Transposed, "first dimension"), (Failing, "does not run"), (nn.Identity, "ports")],
)
def test_models_that_cannot_be_batched(module: type[nn.Module], says: str):
    with pytest.raises(InvalidInputError, match=says):
        make_cell("bad", module())
