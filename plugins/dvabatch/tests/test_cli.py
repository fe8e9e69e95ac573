"""``mlsys dvabatch`` as a user meets it."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import pytest
import torch
from mlsys_core.cli.main import run
from mlsys_core.config import settings
from mlsys_dvabatch.stages.profile import OperatorProfile
from mlsys_dvabatch.stages.vision import VGG19
from mlsys_dvabatch.stages.zoo import Loading, load, open_program
from torch import Tensor, nn


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["serve", "no-such-model"], "is no model DVABatch knows"),
        (["serve", "missing.pt2"], "is no file"),
        (["serve", "vgg19-weights", "--policy", "packed"], "only encoders can be packed"),
        (["serve", "vgg19-weights", "--mode", "bold"], "give literal or cost-aware"),
        (["serve", "vgg19-weights", "--policy", "best"], "no DVABatch policy is called 'best'"),
        (["serve", "vgg19-weights", "--slice-at", "random"], "give time or diversity"),
        (["serve", "vgg19-weights", "--window-ms", "3"], "--window-ms is for --policy delay, not auto"),
        (["serve", "vgg19-weights", "--exit-rule", "margin"], "--exit-rule is for --policy early-exit"),
        (["serve", "vgg19-weights", "--exit-confidence", "0.5"], "--exit-confidence is for --policy early-exit"),
        (["serve", "vgg19-weights", "--exit-confidence", "-1"], "greater than or equal to 0"),
        (["serve", "vgg19-weights", "--threads", "100000"], "less than or equal to 1024"),
        (["profile", "unet", "--shape", "3,x"], "positive numbers with commas"),
        (["profile", "no-such-model"], "is no model DVABatch knows"),
    ],
)
def test_serve_and_profile_refuse_in_one_line(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("mlsys_dvabatch.stages.vision.SHAPES", SMALL_SHAPES)
    monkeypatch.setattr("mlsys_dvabatch.stages.zoo.SHAPES", SMALL_SHAPES)
    monkeypatch.setenv("MLSYS_CACHE_DIR", str(tmp_path))
    settings.cache_clear()
    try:
        assert run(["dvabatch", *options, *(["--port", "0"] if options[0] == "serve" else [])]) == 2
    finally:
        settings.cache_clear()
    assert says in capsys.readouterr().err


class Counts(nn.Module):
    """Counts as parts of the greatest count of the batch, exported with zeros."""

    def forward(self, counts: Tensor) -> Tensor:
        return counts.float() / counts.max().clamp(min=1)


@pytest.mark.parametrize("command", ["profile", "explain", "serve"])
def test_every_command_refuses_a_model_that_mixes_requests(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    dims = ({0: torch.export.Dim("batch", min=1, max=64)},)
    torch.export.save(
        torch.export.export(Counts(), (torch.zeros(2, 4, dtype=torch.int64),), dynamic_shapes=dims), tmp_path / "n.pt2"
    )
    monkeypatch.setenv("MLSYS_CACHE_DIR", str(tmp_path))
    settings.cache_clear()
    try:
        assert run(["dvabatch", command, str(tmp_path / "n.pt2"), *(["--port", "0"] if command == "serve" else [])])
    finally:
        settings.cache_clear()
    assert "n.pt2: the model mixes requests" in " ".join(capsys.readouterr().err.split())


def test_profile_prints_costs_and_a_policy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("mlsys_dvabatch.stages.vision.SHAPES", SMALL_SHAPES)
    monkeypatch.setattr("mlsys_dvabatch.stages.zoo.SHAPES", SMALL_SHAPES)
    monkeypatch.setenv("MLSYS_CACHE_DIR", str(tmp_path))
    settings.cache_clear()
    written = tmp_path / "stages.graphml"
    try:
        assert run(["dvabatch", "profile", "vgg19-weights", "--max-batch", "2", "--graph", str(written)]) == 0
        assert len(list((tmp_path / "dvabatch-profiles").iterdir())) == 1
    finally:
        settings.cache_clear()
    graph = nx.read_graphml(written)
    assert [data["stage"] for _, data in graph.nodes(data=True)] == list(range(1, len(graph) + 1))
    assert graph.number_of_edges() == len(graph) - 1
    out = capsys.readouterr().out
    assert f"wrote {written}" in out.replace("\n", "")
    assert "by number of stages: 1: " in out
    assert "Milliseconds of a batch" in out
    assert "Policy: load" in out


def test_a_model_is_cut_where_preferred_sizes_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mlsys_dvabatch.stages.zoo.SHAPES", SMALL_SHAPES)
    program = open_program("vgg19-weights")
    some = program.allowed_cuts[len(program.allowed_cuts) // 2]
    profile = OperatorProfile((1, 4), tuple((1.0, 4.0 if number < some else 1.0) for number in range(some + 1)))
    monkeypatch.setattr("mlsys_dvabatch.stages.zoo.profile_operators", lambda *_, **__: profile)
    monkeypatch.setattr(type(program), "allowed_cuts", program.allowed_cuts[: program.allowed_cuts.index(some) + 1])
    model = load("vgg19-weights", tmp_path, Loading(num_stages=4, slice_at="diversity")).model
    assert model.num_stages == 2


SMALL_SHAPES = {"vgg19-weights": (lambda: VGG19(32, width=2, num_classes=3, hidden=8), (3, 32, 32))}


def test_a_file_of_torch_save_is_told_what_to_write(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (file := tmp_path / "net.pt").write_bytes(b"PK")
    assert run(["dvabatch", "serve", str(file), "--port", "0"]) == 2
    assert "torch.export.save" in capsys.readouterr().err
