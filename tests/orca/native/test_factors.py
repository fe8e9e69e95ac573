"""Rotary factors from a table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mlsys_orca.backends.native.decoder import Factors
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.layers import Rotary


def rotary_of(**changes: Any) -> Rotary:
    sizes = {"architecture": "llama", "vocab_size": 10, "hidden_size": 256, "intermediate_size": 8, "num_layers": 1}
    more = {
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 64,
        "max_positions": 64,
        "norm_eps": 1e-5,
        "rope_theta": 10_000.0,
    }
    config = ModelConfig(**(sizes | more | changes))  # type: ignore[arg-type]
    return Rotary(config, device=torch.device("cpu"))


@pytest.mark.parametrize("positions", [[0], [5, 6, 7, 1023], [1024], [3, 9000], [32_767, 2], [32_768], [70_000, 1]])
@pytest.mark.parametrize("changes", [{}, {"rotary_dim": 16, "rope_amplitude": 1.2}])
def test_factors_are_the_rotary_s(changes: dict[str, Any], positions: list[int]) -> None:
    rotary, at = rotary_of(**changes), torch.tensor(positions)
    for found, expected in zip(Factors(rotary)(at, max(positions)), rotary(at), strict=True):
        assert torch.equal(found, expected)
