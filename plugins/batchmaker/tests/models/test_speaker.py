"""resemblyzer's embeddings against torch's own LSTM with the package's weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from mlsys_batchmaker.engine import Engine, EngineConfig
from mlsys_batchmaker.models.speaker import speaker_model
from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError, MissingDependencyError
from mlsys_core.models import resolve_model
from torch import nn

try:
    CHECKPOINT: Path | None = resolve_model("resemblyzer", settings().cache_dir)
except MissingDependencyError:
    CHECKPOINT = None


@pytest.mark.model
@pytest.mark.skipif(CHECKPOINT is None, reason="the wheel Resemblyzer is not installed")
@pytest.mark.parametrize("executor", ["cell", "chunk"])
@pytest.mark.parametrize("compiler", ["eager", "auto"])
def test_embeddings_equal_the_torch_module(compiler: str, executor: str):
    assert CHECKPOINT is not None
    state = torch.load(CHECKPOINT, map_location="cpu", weights_only=True)["model_state"]
    lstm, linear = nn.LSTM(40, 256, 3, batch_first=True), nn.Linear(256, 256)
    lstm.load_state_dict({name.removeprefix("lstm."): each for name, each in state.items() if name.startswith("lstm.")})
    linear.load_state_dict({"weight": state["linear.weight"], "bias": state["linear.bias"]})
    rng = np.random.default_rng(0)
    mels = [np.abs(rng.standard_normal((length, 40))).astype(np.float32) for length in (1, 7, 40, 160, 23)]
    with Engine(speaker_model(CHECKPOINT), EngineConfig(executor=executor, compiler=compiler)) as engine:
        answers = [future.result() for future in [engine.submit({"mels": each}) for each in mels]]
        with pytest.raises(InvalidInputError, match="finite"):
            engine.submit({"mels": np.full((3, 40), np.nan, dtype=np.float32)})
    with torch.no_grad():
        for each, answer in zip(mels, answers, strict=True):
            _, (hidden, _) = lstm(torch.from_numpy(each)[None])
            raw = torch.relu(linear(hidden[-1]))
            expected = (raw / torch.norm(raw, dim=1, keepdim=True))[0].numpy()
            np.testing.assert_allclose(answer.outputs["embedding"], expected, rtol=0, atol=1e-5)
