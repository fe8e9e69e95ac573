"""The ``kserve`` client, which needs an environment of its own: benchmarks/peers/kserve/requirements.txt."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("MLSYS_KSERVE_PYTHON", ROOT / ".peers" / "kserve" / "bin" / "python"))


@pytest.mark.skipif(
    not PYTHON.exists(), reason=f"no kserve at {PYTHON} (benchmarks/peers/kserve/requirements.txt; MLSYS_KSERVE_PYTHON)"
)
def test_the_kserve_client_gets_its_answers(reference_server: dict[str, str]) -> None:
    script = Path(__file__).with_name("kserve_probe.py")
    command = [PYTHON, script, reference_server["http"], reference_server["grpc"]]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    answer = ["7", "add", "sum", "FP32", [[2.0, 4.0]]]
    assert found == {
        "rest live": True,
        "rest ready": True,
        "rest model ready": [True, False],
        "rest infer, binary": answer,
        "rest infer, json": answer,
        "rest text": ["HELLO"],
        "rest unknown model": ["HTTPStatusError", 404],
        "grpc live": True,
        "grpc ready": True,
        "grpc model ready": [True, False],
        "grpc infer": answer,
        "grpc unknown model": "StatusCode.NOT_FOUND",
    }
