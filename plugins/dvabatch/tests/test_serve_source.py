"""Models of a running server: unloaded, loaded again, counted by one metric each."""

from __future__ import annotations

import pytest
import torch
from fastapi.testclient import TestClient
from mlsys_core.errors import InvalidInputError
from mlsys_dvabatch.scheduling.policies.load import LoadPolicy
from mlsys_dvabatch.serve.models import ServedModel, StageMetrics
from mlsys_dvabatch.stages.simulated import parse_stages
from mlsys_dvabatch.stages.slicing.program import program_of
from mlsys_dvabatch.stages.slicing.sliced import SlicedModel
from mlsys_dvabatch.stages.zoo import Loaded
from mlsys_open_inference import create_oip_app
from mlsys_serving.models import ArgumentSource, ModelRepository
from prometheus_client import CollectorRegistry
from torch import Tensor, nn

ASKED = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [5, 6, 7]}]}


class Tiny(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def build(argument: str) -> ServedModel:
    torch.manual_seed(0)
    model = SlicedModel(program_of(Tiny().eval(), (torch.ones(1, 3),)), [1])
    return ServedModel(Loaded("tiny", model), parse_stages("1+1,1+1"), LoadPolicy(), max_batch_size=8, num_threads=1)


def test_an_unloaded_model_is_loaded_again_and_answers_as_before():
    source = ArgumentSource(build)
    first = source.add("folder/tiny")
    registry = CollectorRegistry()
    registry.register(StageMetrics(source.latest.values()))
    app = create_oip_app(ModelRepository([first], source=source), registry=registry, model_control=True)
    with TestClient(app) as client:
        before = client.post("/v2/models/tiny/infer", json=ASKED).json()
        assert client.post("/v2/repository/models/tiny/unload").status_code == 200
        assert client.post("/v2/models/tiny/infer", json=ASKED).status_code in (404, 503)
        for _ in range(2):  # and loading what is loaded replaces it
            assert client.post("/v2/repository/models/tiny/load").status_code == 200
            after = client.post("/v2/models/tiny/infer", json=ASKED).json()
            assert after["outputs"] == before["outputs"]
        assert client.post("/v2/repository/models/other/load").status_code == 400
        metrics = client.get("/metrics").text
    assert metrics.count('mlsys_dvabatch_active_requests{model="tiny"}') == 1


def test_a_model_is_given_once():
    source = ArgumentSource(build)
    first = source.add("a/tiny")
    with pytest.raises(InvalidInputError, match=r"b/tiny: there is a model 'tiny' already"):
        source.add("b/tiny")
    assert source.names() == ["tiny"]
    first.engine.close()
