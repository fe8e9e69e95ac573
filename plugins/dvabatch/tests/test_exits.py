"""Early exits end to end: a file with exit heads, the options of the command line, answers of the head that is sure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from mlsys_core.cli.main import run
from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError
from mlsys_dvabatch.serve.models import ServedModel
from mlsys_dvabatch.serve.preparing import Batching, prepare
from mlsys_dvabatch.stages.activations import Padded
from mlsys_dvabatch.stages.slicing.exits import ExitingModel
from mlsys_dvabatch.stages.slicing.program import program_of
from mlsys_dvabatch.stages.zoo import Loading
from mlsys_open_inference import create_oip_app
from mlsys_open_inference.cascades import declared
from mlsys_serving.models import ModelRepository
from torch import Tensor, nn


class Heads(nn.Module):
    """Three blocks, a head behind each."""

    def __init__(self, *, is_backwards: bool = False, num_heads: int = 3, classes: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_backwards = is_backwards
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_heads))
        self.heads = nn.ModuleList(
            nn.Linear(8, classes + (number if classes == 5 else 0)) for number in range(num_heads)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = torch.relu(block(x)) + x
            found.append(head(x))
        return tuple(reversed(found)) if self.is_backwards else tuple(found)


def saved(module: nn.Module, path: Path) -> str:
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad():
        torch.export.save(torch.export.export(module.eval(), (torch.randn(2, 8),), dynamic_shapes=({0: batch},)), path)
    return str(path)


def test_requests_leave_at_the_first_head_that_is_sure(tmp_path: Path):
    module = Heads()
    confidence = 0.7
    prepared = prepare(
        saved(module, tmp_path / "heads.pt2"),
        tmp_path,
        Batching(policy="early-exit", max_batch_size=16),
        Loading(exit_confidence=confidence),
    )
    assert prepared.loaded.model.num_stages == 3
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(1)) * 3
    with torch.no_grad():
        heads = torch.stack(module(x), 1)  # [requests, heads, classes]
    is_sure = heads.softmax(-1).amax(-1) >= confidence
    is_sure[:, -1] = True
    expected = is_sure.int().argmax(1)
    assert set(expected.tolist()) == {0, 1, 2}
    served = ServedModel(prepared.loaded, prepared.costs, prepared.policy, max_batch_size=16, num_threads=1)
    assert [(each.name, list(each.shape)) for each in served.spec.outputs] == [
        ("output_0", [-1, 4]),
        ("output_1", [-1]),
    ]
    with TestClient(create_oip_app(ModelRepository([served]))) as client:
        for start in range(0, 40, 8):
            given = x[start : start + 8]
            body = {"name": "x", "datatype": "FP32", "shape": [8, 8], "data": given.flatten().tolist()}
            answer = client.post("/v2/models/heads/infer", json={"inputs": [body]})
            assert answer.status_code == 200, answer.text
            scores, exits = (output["data"] for output in answer.json()["outputs"])
            own = expected[start : start + 8]
            assert exits == own.tolist()
            wanted = heads[torch.arange(start, start + 8), own]
            np.testing.assert_allclose(np.reshape(scores, (8, 4)), wanted, rtol=1e-4, atol=1e-5)
    assert served.engine.scheduler.counters["early exits"] == int((expected < 2).sum())


@pytest.mark.parametrize(
    ("module", "options", "says"),
    [
        (Heads(num_heads=1), {}, "has no exits, but 1 outputs of shapes"),
        (Heads(classes=5), {}, "has no exits, but 3 outputs of shapes"),
        (Heads(is_backwards=True), {}, "nothing is left to compute behind"),
        (Heads(), {"loading": Loading(exit_confidence=0.0)}, "an exit confidence of 0.0"),
        (Heads(), {"batching": Batching(policy="early-exit", num_stages=2)}, "leave out --stages and --compiler"),
    ],
    ids=["one", "shapes", "order", "confidence", "stages"],
)
def test_models_without_such_heads_are_refused(tmp_path: Path, module: nn.Module, options: dict[str, Any], says: str):
    with pytest.raises(InvalidInputError, match=says):
        prepare(
            saved(module, tmp_path / "heads.pt2"), tmp_path, **{"batching": Batching(policy="early-exit")} | options
        )


def test_profile_shows_the_costs_of_each_stage_and_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("MLSYS_CACHE_DIR", str(tmp_path))
    settings.cache_clear()
    command = ["dvabatch", "profile", saved(Heads(), tmp_path / "heads.pt2"), "--exits", "--max-batch", "2"]
    written = tmp_path / "stages.graphml"
    try:
        assert run([*command, "--graph", str(written)]) == 0
        out = capsys.readouterr().out
        assert run([*command, "--stages", "2"]) == 2
        assert "leave out --stages" in capsys.readouterr().err
    finally:
        settings.cache_clear()
    rows = {
        cells[:-2][-1]: cells[-2:]
        for line in out.splitlines()
        if line.startswith(" to exit") and (cells := line.split())
    }
    assert list(rows) == ["1", "2", "3"]
    assert [float(row[0]) for row in rows.values()] == sorted(float(row[0]) for row in rows.values())
    assert "Policy: early-exit." in out
    assert all(has_exit for _, has_exit in nx.read_graphml(written).nodes(data="has_exit"))


class AtTheEnd(Heads):
    """The same heads, all computed after the last block, as a forward is often written."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = []
        for block in self.blocks:
            x = torch.relu(block(x)) + x
            hidden.append(x)
        return tuple(head(each) for head, each in zip(self.heads, hidden, strict=True))


def test_heads_at_the_end_of_a_forward_leave_work_to_save():
    x = torch.randn(6, 8)
    written, usual = (ExitingModel(program_of(module.eval(), (x[:1],)), 0.4) for module in (AtTheEnd(), Heads()))
    assert written.cuts == usual.cuts
    with torch.inference_mode():
        expected = AtTheEnd().eval()(x)
        values = Padded({written.input_names[0]: x})
        for stage in range(3):
            values = written.run(stage, values)
    for got, one in zip(values.tensors.values(), expected, strict=True):
        torch.testing.assert_close(got, one)


@pytest.mark.parametrize("rule", ["confidence", "margin", "entropy"])
def test_a_rule_decides_which_head_is_sure(rule: str):
    module = Heads().eval()
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)) * 3
    model = ExitingModel(program_of(module, (x[:1],)), 0.4, rule=rule)
    with torch.no_grad():
        scores = module(x)[0]
        values = model.run(0, Padded({"x": x}))
    shares = scores.softmax(-1)
    first, second = shares.topk(2).values.unbind(-1)
    entropy = 1 + (shares * shares.log()).sum(-1) / np.log(4)
    sure = {"confidence": first, "margin": first - second, "entropy": entropy}[rule] >= 0.4
    exits, skips = model.inspect(0, values)
    assert sorted(exits) == sure.nonzero().flatten().tolist()
    assert 0 < len(exits) < 64
    assert skips == {}
    with pytest.raises(InvalidInputError, match="--exit-rule 'luck'"):
        ExitingModel(program_of(module, (x[:1],)), 0.4, rule="luck")


def test_a_cascade_of_two_served_files(tmp_path: Path):
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)) * 3
    served, scores = [], {}
    for number, name in enumerate(("small", "large")):
        torch.manual_seed(number)
        module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
        path = saved(module, tmp_path / f"{name}.pt2")
        made = prepare(path, tmp_path, Batching(policy="plain", max_batch_size=8, num_stages=2))
        served.append(ServedModel(made.loaded, made.costs, made.policy, max_batch_size=8, num_threads=1))
        with torch.no_grad():
            scores[name] = module(x)
    shares = scores["small"].softmax(-1).amax(-1)
    at_least = float(shares.sort().values[3:5].mean())  # four rows go on
    goes_on = shares < at_least
    level = {"model": "small", "output": "output_0", "at_least": at_least}
    both = declared({"name": "both", "cascade": [level, {"model": "large"}]})
    repository = ModelRepository(served)
    repository.configure(composed=[both])
    with TestClient(create_oip_app(repository)) as client:
        name = served[0].spec.inputs[0].name
        body = {"name": name, "datatype": "FP32", "shape": [8, 8], "data": x.flatten().tolist()}
        answer = client.post("/v2/models/both/infer", json={"inputs": [body]})
        assert answer.status_code == 200, answer.text
        found = {output["name"]: output["data"] for output in answer.json()["outputs"]}
    assert found["level"] == goes_on.int().tolist()
    wanted = torch.where(goes_on[:, None], scores["large"], scores["small"])
    np.testing.assert_allclose(np.reshape(found["output_0"], (8, 4)), wanted, rtol=1e-4, atol=1e-5)
