"""Everything ``tritonclient`` can do, against a server in a process of its own; see ``probes.py``."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

for _client in ("tritonclient.http", "tritonclient.grpc", "tritonclient.http.aio"):
    pytest.importorskip(_client)

HERE = Path(__file__).parent


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"oip_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault(f"oip_{name}", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


probes = load("probes")


@pytest.fixture(scope="module")
def urls(reference_server: dict[str, str]) -> Any:
    return probes.Urls(**reference_server)


@pytest.mark.parametrize("name", [probe.name for probe in probes.PROBES])
def test_probe(urls: Any, name: str) -> None:
    [probe] = [probe for probe in probes.PROBES if probe.name == name]
    assert probes.outcome(probe, urls) == json.loads(json.dumps(probe.expected))


def test_the_script_reports_and_fails_where_an_answer_is_not_the_expected_one(urls: Any) -> None:
    command = [sys.executable, HERE / "probes.py", "--http", urls.http, "--grpc", urls.grpc]
    done = subprocess.run([*command, "--server", "triton"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "FAIL http bf16: [[1.5, -3.0]]" in done.stdout
    assert "ok   health" in done.stdout
