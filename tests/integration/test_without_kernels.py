"""Without a compiler and cached kernels: subsystems answer as right as ever and say once that they are slower.

BatchMaker's scheduler has no other form: its error names the next step.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.orca.conftest import tiny_metadata, tiny_tensors, write_gguf

WHO = ("Nimble", "Orca", "WindTunnel")
SCRIPT = """
import sys
import numpy as np
import torch
from mlsys_batchmaker.models.sequence import lstm_model
from mlsys_core.errors import KernelUnavailableError
from mlsys_nimble import Nimble
from mlsys_orca.loading.load import load_model
from mlsys_windtunnel.convert.translation import translate
from sklearn.ensemble import RandomForestRegressor

torch.manual_seed(0)
for _ in range(2):
    net, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval(), torch.randn(4, 8)
    torch.testing.assert_close(Nimble(net).prepare((x,))(x), net(x))

    rows = np.random.default_rng(0).normal(size=(50, 3))
    forest = RandomForestRegressor(n_estimators=3, max_depth=3, random_state=0).fit(rows, rows[:, 0])
    np.testing.assert_allclose(translate(forest).predict(rows), forest.predict(rows))

    assert load_model(sys.argv[1], dtype="fp32").model is not None

    try:
        lstm_model(num_words=9, hidden_size=8)
    except KernelUnavailableError as error:
        assert "no C++ compiler was found: apt-get install g++" in str(error)
    else:
        raise AssertionError("a planner without its kernel")
"""


@pytest.mark.slow
def test_each_subsystem_answers_and_says_so_once(tmp_path: Path):
    write_gguf(tmp_path / "tiny.gguf", tiny_metadata(), tiny_tensors())
    environ = {**os.environ, "PATH": str(tmp_path), "MLSYS_CACHE_DIR": str(tmp_path / "cache"), "CXX": ""}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "tiny.gguf")]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for who in WHO:
        (line,) = [line for line in result.stderr.splitlines() if line.startswith(f"{who}: ")]
        assert "no C++ compiler was found: apt-get install g++" in line
