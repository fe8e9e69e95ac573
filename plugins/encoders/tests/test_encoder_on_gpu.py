"""Stages on a CUDA device give what they give in host memory, whatever the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlsys_core.device import Device, get_device
from mlsys_core.loop import Collector, FinishReason, ServeRequest
from mlsys_dvabatch.engine import Engine
from mlsys_dvabatch.scheduling.policies.input import InputPolicy, PackedPolicy
from mlsys_dvabatch.scheduling.policies.operator import OperatorPolicy
from mlsys_dvabatch.stages.profile import profile_stages
from mlsys_dvabatch.stages.zoo import Loading, load

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def answers(name: str, policy: Any, device: Device, payloads: list[Any], **options: Any) -> list[Any]:
    loaded = load(name, Path("unused"), Loading(num_stages=2, device=device, **options))
    costs = profile_stages(loaded.model, loaded.request, batch_sizes=(1, 4), repeats=1, device=device)
    collector = Collector[Any, Any]()
    with Engine(loaded.model, costs, policy, listener=collector, device=device, max_batch_size=8) as engine:
        for number, payload in enumerate(payloads):
            length = len(payload) if isinstance(payload, np.ndarray) else None
            engine.loop.submit(ServeRequest(str(number), payload, length=length), str(number))
        assert engine.loop.drain(60)
    finished = [collector.finished[str(number)] for number in range(len(payloads))]
    assert {each.reason for each in finished} == {FinishReason.DONE}
    return [np.asarray(each.result) for each in finished]


@pytest.mark.parametrize(("policy", "is_packed"), [(InputPolicy, False), (PackedPolicy, True), (OperatorPolicy, False)])
def test_an_encoder(policy: Any, is_packed: bool) -> None:
    rng = np.random.default_rng(0)
    payloads = [rng.integers(5, 1000, length) for length in (3, 17, 40, 1, 64, 9, 30, 5)]
    host, gpu = (
        answers("minilm-random", policy(), get_device(device), payloads, is_packed=is_packed)
        for device in ("cpu", "cuda")
    )
    for ours, theirs in zip(gpu, host, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
