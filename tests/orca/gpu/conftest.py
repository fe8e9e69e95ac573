from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Device of the kernels. No GPU where the run insists on one is a failure."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if os.environ.get("MLSYS_REQUIRE_GPU") == "1":
            pytest.fail("MLSYS_REQUIRE_GPU=1, but torch sees no CUDA device")
        pytest.skip("torch sees no CUDA device")
    return torch.device("cuda")
