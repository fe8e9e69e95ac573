"""These tests run twice: in Triton's interpreter on the CPU (``TRITON_INTERPRET=1``, which ``../test_interpreted.py``
sets in a process of its own, since it must be set before Triton is imported), and on a GPU (``make test-gpu``)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not IS_INTERPRETED and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cpu") if IS_INTERPRETED else request.getfixturevalue("device")
