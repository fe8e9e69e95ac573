"""The page ``docs/ways/stage.md`` lists the files that a request passes, from a front to the stages and back."""

from __future__ import annotations

import asyncio

import numpy as np
import torch
from mlsys_dvabatch.scheduling.policies.load import LoadOperatorPolicy
from mlsys_dvabatch.serve.models import ServedModel
from mlsys_dvabatch.stages.simulated import parse_stages
from mlsys_dvabatch.stages.slicing.program import program_of
from mlsys_dvabatch.stages.slicing.sliced import SlicedModel
from mlsys_dvabatch.stages.zoo import Loaded
from mlsys_serving.models import InferRequest
from torch import nn

from tests.ways import ROOT, files_of_page, files_passed, num_lines

PAGE = "docs/ways/stage.md"


def test_a_stages_way():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    model = SlicedModel(program_of(net, (torch.ones(1, 3),)), [1])
    served: list[ServedModel] = []

    def start() -> None:
        costs, policy = parse_stages("1+1,1+1"), LoadOperatorPolicy()
        served.append(ServedModel(Loaded("net", model), costs, policy, num_threads=1))

    def call() -> None:
        (given,) = served[-1].spec.inputs
        inputs = {given.name: np.ones((1, 3), np.float32)}
        request = InferRequest(key="1", model_name="net", model_version="1", inputs=inputs, outputs=(), num_rows=1)
        asyncio.run(served[-1].infer(request))

    start(), call()  # the policy's plan is made once
    passed = files_passed(call, start=start)
    for each in served:
        asyncio.run(each.close())
    assert sorted(files_of_page(PAGE)) == sorted(passed)
    assert f"{len(passed)} Python files" in (ROOT / PAGE).read_text()
    assert num_lines(passed) < 5600
